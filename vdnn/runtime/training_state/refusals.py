"""Refuses optimizers whose step cannot run on a slice of their parameters, before anything has moved.

torch's own optimizers are known: all but LBFGS update a parameter from that parameter, its gradient and its state. An
optimizer of another class is tried on small stand-ins for its parameters, once in slices and once as a whole: three
steps of each must give the same bits, and draw the same random numbers.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from vdnn.errors import CombinationError, VdnnError
from vdnn.runtime.torch_internals.local_shards import is_offloaded_by_fsdp
from vdnn.runtime.torch_internals.random_state import random_state_kept, random_states, seed_all
from vdnn.runtime.torch_internals.tensor_kinds import has_plain_storage, plain_part
from vdnn.runtime.training_state.optimizer_copies import attributes_of, copy_without_state, own_step_of
from vdnn.runtime.training_state.sliced_step import SlicedStep, named_state_of, slicing_refusal
from vdnn.runtime.training_state.slices import options_of, parameters_of, slices_of
from vdnn.runtime.training_state.state_tensors import places_in

FSDP_OFFLOADS = {
    "ours": "optimizer=",
    "theirs": "FSDP2's CPUOffloadPolicy",
    "reason": "both keep the optimizer's state on the host, and torch would step on the CPU",
    "way_out": "Leave offload_policy out of fully_shard, or optimizer= out of vdnn.offload",
}
_STEPS = 3
_LARGEST_SIDE = 4
_DEEP = 4  # objects in objects are looked into so far
_MOST_STAND_INS = 3  # of one group and number of dimensions


def require_sliceable(optimizer: torch.optim.Optimizer) -> None:
    """Raises VdnnError unless `optimizer` can be stepped in slices."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise VdnnError(slicing_refusal(optimizer, "it steps along one direction for all of them"))
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise VdnnError(slicing_refusal(optimizer, "differentiable=True keeps its state in the graph"))
    if _has_options_by_place(optimizer):
        raise VdnnError(
            slicing_refusal(optimizer, "single parameters have options, which it finds by their places in the groups")
        )
    parameters = list(parameters_of(optimizer))
    if any(map(is_offloaded_by_fsdp, parameters)):
        raise CombinationError(**FSDP_OFFLOADS)
    own = type(optimizer).__module__
    if own == "torch.optim" or own.startswith("torch.optim."):
        return
    if any(isinstance(parameter, FakeTensor) or plain_part(parameter) is None for parameter in parameters):
        return  # a virtual machine has no bits to compare
    with random_state_kept():
        _try(optimizer)


def _has_options_by_place(optimizer: torch.optim.Optimizer) -> bool:
    """bitsandbytes has one object of the process for such options."""
    known = ("module_weight_config_triple", "pid2config", "index2config")
    return any(getattr(getattr(optimizer, "mng", None), name, None) for name in known)


def refuse_what_cannot_step_on_the_cpu(optimizer: torch.optim.Optimizer) -> None:
    """Raises VdnnError if copies on the host cannot stand in for the parameters of `optimizer`."""
    parameters = list(parameters_of(optimizer))
    if any(isinstance(parameter, FakeTensor) or not has_plain_storage(parameter) for parameter in parameters):
        raise VdnnError(_on_the_device(optimizer, "a parameter is of another class than torch.nn.Parameter"))
    storages = [parameter.untyped_storage()._cdata for parameter in parameters]
    if len(set(storages)) < len(storages):
        raise VdnnError(_on_the_device(optimizer, "two of its parameters share memory"))


def _on_the_device(optimizer: torch.optim.Optimizer, why: str) -> str:
    return f"{type(optimizer).__name__} cannot be stepped on the CPU: {why}. Use optimizer_on='device'."


def _try(optimizer: torch.optim.Optimizer) -> None:
    try:
        whole, sliced = (_stand_in(optimizer) for _ in range(2))
    except Exception as error:
        raise VdnnError(
            slicing_refusal(optimizer, f"a copy of it for small parameters cannot be made ({error})")
        ) from error
    own_step = own_step_of(optimizer)
    try:
        for step in range(_STEPS):
            _step_as_a_whole(whole, own_step, step)
            drawn = random_states()
            _step_in_slices(sliced, own_step, step)
            if drawn != random_states():
                raise VdnnError(slicing_refusal(optimizer, "it draws random numbers once for all parameters"))
    except VdnnError:
        raise
    except Exception as error:
        raise VdnnError(slicing_refusal(optimizer, f"a step on small parameters failed ({error})")) from error
    for tensor, other in zip(_tensors_of(whole), _tensors_of(sliced), strict=True):
        if not torch.equal(tensor.cpu(), other.cpu()):
            raise VdnnError(slicing_refusal(optimizer, "the step of one parameter depends on others"))
    options, others = (list(map(options_of, one.param_groups)) for one in (whole, sliced))
    if not _are_alike(options, others):
        raise VdnnError(slicing_refusal(optimizer, "it changes tensors among its options by what is in a slice"))
    if not _are_alike(named_state_of(whole), named_state_of(sliced)):
        raise VdnnError(
            slicing_refusal(optimizer, "its state has more than that of parameters, which each slice changes")
        )
    if not _are_alike(attributes_of(whole), attributes_of(sliced)):
        raise VdnnError(slicing_refusal(optimizer, "it counts its own calls"))


def _step_as_a_whole(optimizer: torch.optim.Optimizer, own_step: Callable[..., Any], seed: int) -> None:
    seed_all(seed)
    _draw_gradients(optimizer)
    own_step(optimizer)


def _step_in_slices(optimizer: torch.optim.Optimizer, own_step: Callable[..., Any], seed: int) -> None:
    seed_all(seed)
    _draw_gradients(optimizer)
    sliced = SlicedStep(optimizer, functools.partial(own_step, optimizer), (), {})
    for part in slices_of(optimizer.param_groups, lambda parameter: 1, 1):
        sliced.step(part)
    sliced.end()


def _stand_in(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """A copy of `optimizer` without state, for small parameters of the same dtypes and numbers of dimensions."""
    groups = []
    for group in optimizer.param_groups:
        groups.append({**copy.deepcopy(options_of(group)), "params": list(_small(group["params"]))})
    return copy_without_state(optimizer, groups)


def _are_alike(one: Any, other: Any, deep: int = _DEEP) -> bool:
    """Compares values, and objects by their attributes."""
    if one is other:  # NaN is not equal to itself
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_are_alike(one[key], other[key], deep) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(_are_alike(a, b, deep) for a, b in zip(one, other, strict=True))
    if hasattr(one, "__dict__") and "__eq__" not in vars(type(one)):
        return deep == 0 or _are_alike(vars(one), vars(other), deep - 1)
    return bool(one == other)


def _small(parameters: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    made: dict[tuple[int, torch.dtype], int] = {}
    for parameter in parameters:
        kind = parameter.dim(), parameter.dtype
        made[kind] = made.get(kind, 0) + 1
        if made[kind] <= _MOST_STAND_INS:
            sizes = [min(size, _LARGEST_SIDE + made[kind]) for size in parameter.size()]
            values = torch.linspace(-1, 1, max(1, int(torch.Size(sizes).numel())), dtype=torch.float32)
            small = values.reshape(sizes).to(parameter.device, parameter.dtype)
            yield torch.nn.Parameter(small, requires_grad=parameter.requires_grad)


def _draw_gradients(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad:
                parameter.grad = torch.randn(parameter.size()).to(parameter.device, parameter.dtype)


def _tensors_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield parameter.detach()
            yield from (place.tensor for place in places_in(optimizer.state.get(parameter)))
