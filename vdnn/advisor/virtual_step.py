"""Rehearses one step of a training, unchanged or with a change, on a virtual machine: its time, peak and counts.

The first step warms up and the second counts. Under vdnn.offload there are two more: one is recorded, and the last
follows the plan. Optimizers take the loops that they would take on a GPU, not those of the CPU.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from vdnn.advisor.census import Census
from vdnn.advisor.change import Change
from vdnn.advisor.host_reads import HostReads
from vdnn.advisor.host_syncs import HostSync
from vdnn.advisor.optimizer_state import OptimizerForm, form_of
from vdnn.advisor.parts import ExaminedTraining, Parts
from vdnn.hardware import HardwareProfile
from vdnn.runtime.machine.virtual_machine import VirtualMachine
from vdnn.runtime.rehearsal.cuda_shaped import CudaShaped
from vdnn.runtime.rehearsal.logits import LogitsWatch
from vdnn.runtime.rehearsal.stage import stage
from vdnn.runtime.session.offload import offload

_STEPS = 2
_STEPS_OFFLOADED = 4


@dataclass(frozen=True, slots=True)
class VirtualStep:
    """The figures of one rehearsed step. `products` counts forward and backward products by the name of their dtype.
    `logits_bytes` are those that a linear makes for a cross entropy, 0 if none does; it has `logits_features`
    for each of `logits_classes`. `norm_biases` names the biases that a batch norm cancels, each with its norm."""

    batch: int
    step_ns: int
    peak_bytes: int
    products: tuple[tuple[str, int], ...]
    products_tf32_could_take: int
    convolutions: int
    filled_gradients: int
    filled_bytes: int
    syncs: tuple[HostSync, ...]
    norm_biases: tuple[tuple[str, str], ...]
    blocks: int
    convolution_weights: ConvolutionWeights | None
    optimizer: OptimizerForm | None
    logits_bytes: int = 0
    logits_rows: int = 0
    logits_classes: int = 0
    logits_features: int = 0


def rehearse(
    training: ExaminedTraining, profile: HardwareProfile, change: Change, host_reads: HostReads | None = None
) -> VirtualStep:
    """Rehearse the step with `change`. The same step and change give the same numbers on any machine."""
    batch = change.batch or training.batch
    known, scale = host_reads or HostReads(), batch / change.micro_batches / training.batch
    machine = VirtualMachine(profile, workspaces=True)
    with _tf32(change), torch.autograd.set_detect_anomaly(False), machine, stage(machine):
        parts = training.parts(batch // change.micro_batches)
        blocks = _apply(change, parts)
        state = [] if parts.optimizer is None else list(parts.optimizer.state.values())
        machine.tracker.track([parts.model, parts.inputs, *tree_leaves(state)])
        steps = _STEPS if change.offload_bytes is None else _STEPS_OFFLOADED
        with contextlib.ExitStack() as stack:
            session = None
            if change.offload_bytes is not None:
                session = stack.enter_context(offload(budget=change.offload_bytes, device=machine))
            census = stack.enter_context(
                Census(parts.model, parts.optimizer, known, lambda: machine_aside(machine), scale)
            )
            watch = stack.enter_context(LogitsWatch(change.loss_chunk_rows))
            for _ in range(steps):
                watch.begin_step()
                census.begin_step()
                machine.reset_peak()
                begin_ns = machine.now_ns
                _run(parts, change)
                if session is not None:
                    session.step()
            step_ns, peak_bytes = machine.now_ns - begin_ns, machine.peak_bytes
        counts = census.counts
        names = {id(parameter): name for name, parameter in parts.model.named_parameters()}
        norms = {one.bias_id: one.norm_id for one in counts.biases}
        removable = [one for one in names if one in norms and _is_removable(parts.model, names[one])]
        return VirtualStep(
            batch=batch,
            step_ns=step_ns,
            peak_bytes=peak_bytes,
            products=tuple(sorted((str(kind).removeprefix("torch."), n) for kind, n in counts.products.items())),
            products_tf32_could_take=counts.products_tf32_could_take,
            convolutions=counts.convolutions,
            filled_gradients=counts.filled_gradients,
            filled_bytes=counts.filled_bytes,
            syncs=counts.host_syncs,
            norm_biases=tuple((names[one], _module_of(names.get(norms[one], ""))) for one in removable),
            blocks=blocks,
            convolution_weights=convolution_weights(parts.model),
            optimizer=None if parts.optimizer is None else form_of(parts.optimizer),
            logits_bytes=watch.logits_bytes,
            logits_rows=watch.rows,
            logits_classes=watch.classes,
            logits_features=watch.features,
        )


def _run(parts: Parts, change: Change) -> None:
    for _ in range(change.micro_batches):
        if parts.step is not None:
            parts.step()
            continue
        with _autocast(change):
            loss = parts.compute_loss()
        scaled = loss if change.micro_batches == 1 else loss / change.micro_batches
        scaled.backward()  # type: ignore[no-untyped-call]
    if parts.is_whole:
        return
    if parts.optimizer is not None:
        parts.optimizer.step()
    parts.model.zero_grad(set_to_none=True)


def _autocast(change: Change) -> contextlib.AbstractContextManager[object]:
    if change.autocast is None:
        return contextlib.nullcontext()
    return torch.autocast("cpu", getattr(torch, change.autocast))


@contextlib.contextmanager
def _tf32(change: Change) -> Iterator[None]:
    products = torch.backends.cuda.matmul
    before = products.fp32_precision
    if change.tf32:
        products.fp32_precision = "tf32"
    try:
        yield
    finally:
        if change.tf32:
            products.fp32_precision = before


@contextlib.contextmanager
def machine_aside(machine: VirtualMachine) -> Iterator[None]:
    """A context in which operations on the host take no time of the card."""
    before, machine.aside_ns = machine.aside_ns, 0
    try:
        yield
    finally:
        machine.aside_ns = before


def _apply(change: Change, parts: Parts) -> int:
    """Apply `change` to parts that were made for this rehearsal. Returns the number of checkpointed blocks."""
    model, optimizer = parts.model, parts.optimizer
    for name in change.without_biases:
        _remove_bias(parts, name)
    if change.channels_last:
        to_channels_last(model)
    for group in [] if optimizer is None else optimizer.param_groups:
        if change.fused and "fused" in group:
            group["fused"], group["foreach"] = True, False
        elif "foreach" in group and group["foreach"] is None and not group.get("fused"):
            group["foreach"] = _takes_lists(group)
    if change.autocast is not None and parts.step is not None:
        forward = torch.autocast("cpu", getattr(torch, change.autocast))(model.forward)
        object.__setattr__(model, "forward", forward)
    if change.set_to_none:
        for holder in (model, optimizer):
            if holder is not None:
                object.__setattr__(holder, "zero_grad", _to_none(holder.zero_grad))
    return checkpoint_blocks(model) if change.checkpointed else 0


def _takes_lists(group: dict[str, Any]) -> bool:
    """True if torch would update the group in lists (foreach) on a GPU."""
    rate_is_tensor = isinstance(group.get("lr"), torch.Tensor) and not group.get("capturable")
    return not group.get("differentiable") and not rate_is_tensor


def _to_none(zero_grad: Any) -> Any:
    def to_none(set_to_none: bool = True) -> None:
        zero_grad(set_to_none=True)

    return to_none


def _remove_bias(parts: Parts, name: str) -> None:
    module = parts.model.get_submodule(_module_of(name))
    bias = parts.model.get_parameter(name)
    module.register_parameter("bias", None)
    if parts.optimizer is None:
        return
    for group in parts.optimizer.param_groups:
        group["params"] = [one for one in group["params"] if one is not bias]
    parts.optimizer.state.pop(bias, None)


def _module_of(parameter_name: str) -> str:
    return parameter_name.rpartition(".")[0]


def _is_removable(model: torch.nn.Module, name: str) -> bool:
    if name.rpartition(".")[2] != "bias":
        return False
    module = model.get_submodule(_module_of(name))
    return isinstance(module, (torch.nn.modules.conv._ConvNd, torch.nn.Linear))


# Finds the blocks that a model repeats, and checkpoints them in a rehearsal.

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The outermost modules that have submodules and whose class occurs at least twice. A container is not a block, but
    the modules in it may be."""
    inner = [one for one in model.modules() if one is not model and _may_be_block(one)]
    times = Counter(type(one) for one in inner)
    return list(_outermost(model, {kind for kind, count in times.items() if count > 1}))


def checkpoint_blocks(model: nn.Module) -> int:
    """Make the backward pass recompute each block from now on. Returns the number of blocks."""
    blocks = repeated_blocks(model)
    for block in blocks:
        recomputed = functools.partial(checkpoint, block.forward, use_reentrant=False, context_fn=_contexts)
        object.__setattr__(block, "forward", recomputed)  # the instance's attribute hides the method of its class
    return len(blocks)


def _contexts() -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
    """Contexts for the forward pass and the recompute. Torch disables function modes in the backward pass, so without
    CudaShaped the recompute would have the shapes of the CPU."""
    return nullcontext(), CudaShaped()


def _may_be_block(module: nn.Module) -> bool:
    has_parts = next(module.children(), None) is not None
    return has_parts and type(module) not in _CONTAINERS and next(module.parameters(), None) is not None


def _outermost(module: nn.Module, kinds: set[type[nn.Module]]) -> Iterator[nn.Module]:
    for child in module.children():
        if type(child) in kinds:
            yield child
        else:
            yield from _outermost(child, kinds)


# The memory layout of a model's convolution weights: which one they have, and how to change it.

_LAYOUTS = {4: torch.channels_last, 5: torch.channels_last_3d}
_NAMES = {4: "channels_last", 5: "channels_last_3d"}


@dataclass(frozen=True, slots=True)
class ConvolutionWeights:
    """Counts of the weights of convolutions with two or three dimensions. Weights of 1 x 1 kernels have both layouts at
    once and do not count as channels first."""

    total: int
    channels_first: int
    layout: str


def convolution_weights(model: torch.nn.Module) -> ConvolutionWeights | None:
    """The counts for `model`, or None if it has no such convolutions."""
    weights = [one.weight for one in model.modules() if isinstance(one, _ConvNd) and one.weight.dim() in _LAYOUTS]
    if not weights:
        return None
    first = [one for one in weights if not one.is_contiguous(memory_format=_LAYOUTS[one.dim()])]
    return ConvolutionWeights(len(weights), len(first), _NAMES[weights[0].dim()])


def to_channels_last(model: torch.nn.Module) -> None:
    """Stores the weights of convolutions channels last. Each stays the same object, so an optimizer keeps it."""
    for one in model.modules():
        if isinstance(one, _ConvNd) and one.weight.dim() in _LAYOUTS:
            weight = one.weight.detach()
            one.weight.data = weight.contiguous(memory_format=_LAYOUTS[weight.dim()])
