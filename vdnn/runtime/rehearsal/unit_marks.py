"""Watches one step of a model on a virtual machine and cuts it into units: times, memory and saves of each.

A unit begins where a block's forward begins, and ends where the next block of its stack begins, or with the last block
of the stack. The operations before, between and behind the stacks are units of their own. In backward a unit ends when
the gradient of its input is complete. Where that input needs no gradient, what remains belongs to the unit before the
last one that ended.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from vdnn.runtime.machine.virtual_machine import VirtualMachine
from vdnn.runtime.rehearsal.unit_modules import Block
from vdnn.runtime.torch_internals.backward_modes import backward_under
from vdnn.runtime.torch_internals.clipping import Own, replace_passes
from vdnn.runtime.torch_internals.tensor_kinds import storages_of


@dataclass(slots=True)
class MarkedUnit:
    """One unit of the forward pass. `begin_bytes` are allocated when it begins. `boundary_bytes` are those of its
    input, and 0 for the first unit, whose input is the batch. `shared` maps storages that it made and that other units
    save to their bytes."""

    name: str
    begin_bytes: int
    boundary_bytes: int
    forward_ns: int = 0
    backward_ns: int = 0
    forward_issue_ns: int = 0  # by the host; the next for backward
    backward_issue_ns: int = 0
    forward_peak_bytes: int = 0
    backward_peak_bytes: int = 0
    boundary: int | None = None  # the storage of the input
    live: Mapping[int, object] = field(default_factory=dict)  # at its begin
    shared: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class MarkedStep:
    """One step. `uses` has the units, by number, that use each parameter, by id. `gradients` has the bytes of each
    parameter's gradient. `passes` is how many backward passes the step has; only the first is cut into units."""

    begin_bytes: int
    units: list[MarkedUnit]
    uses: dict[int, set[int]] = field(default_factory=dict)
    gradients: dict[int, int] = field(default_factory=dict)
    forward_end_bytes: int = 0
    forward_end_live: Mapping[int, object] = field(default_factory=dict)
    passes: int = 0
    step_ns: int = 0  # of the optimizers
    step_issue_ns: int = 0
    clips: bool = False


class UnitWatch:
    """Marks the units of a step. Use watch() around the step."""

    def __init__(self, machine: VirtualMachine, model: torch.nn.Module, blocks: list[Block]) -> None:
        self._machine, self._model, self._blocks = machine, model, blocks
        self._parameters = {one.untyped_storage()._cdata: one for one in model.parameters()}
        self._is_backward = False
        self._now = 0
        self._step_began = 0

    @contextlib.contextmanager
    def watch(self) -> Iterator[MarkedStep]:
        """A context for one step. The marks are complete at its end."""
        tracker = self._machine.tracker
        tracker.take_peak_bytes()
        stacks = list(dict.fromkeys(block.stack for block in self._blocks))
        first = f"before {stacks[0] or 'the layers'}" if stacks else "the model"
        start = MarkedUnit(first, tracker.live_bytes, 0, live=tracker.live_storages())
        self.step = MarkedStep(tracker.live_bytes, [start])
        self._now, self._is_backward = self._machine.now_ns, False
        self._issued_ns = self._machine.issued_ns
        handles = self._hooks()
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda packed: packed)
        with hooks, backward_under(self._backward), _clipping_noted(self.step):
            yield self.step
        for handle in handles:
            handle.remove()

    def _hooks(self) -> list[Any]:
        handles: list[Any] = []
        of_blocks = {id(one) for block in self._blocks for one in block.module.modules()}
        for index, block in enumerate(self._blocks):
            entered, left = _Entered(self, index), _Left(self, index)
            handles.append(block.module.register_forward_pre_hook(entered, with_kwargs=True))
            handles.append(block.module.register_forward_hook(left))
        for module in self._model.modules():
            if id(module) not in of_blocks and next(module.parameters(recurse=False), None) is not None:
                handles.append(module.register_forward_pre_hook(self._used))
        for parameter in self._model.parameters():
            if parameter.requires_grad:
                handles.append(parameter.register_post_accumulate_grad_hook(self._gradient))  # type: ignore[no-untyped-call]
        handles.append(register_optimizer_step_pre_hook(self._step_begins))
        handles.append(register_optimizer_step_post_hook(self._step_ends))
        return handles

    @property
    def is_forward(self) -> bool:
        """True while the first forward pass runs."""
        return not self._is_backward and not self.step.passes

    def entered(self, index: int, inputs: Any) -> None:
        block = self._blocks[index]
        if self.is_forward:
            self._begin(block.name, inputs)
            for parameter in block.module.parameters():
                self._use(parameter)

    def left(self, index: int, output: Any) -> None:
        block = self._blocks[index]
        following = self._blocks[index + 1] if index + 1 < len(self._blocks) else None
        if self.is_forward and (following is None or following.stack != block.stack):
            there = block.stack or "the layers"
            name = f"after {there}" if following is None else f"between {there} and {following.stack}"
            self._begin(name, output)

    def _begin(self, name: str, inputs: Any) -> None:
        """Ends the unit that runs, and begins the next."""
        self._end_forward()
        boundary = next((one for one in _tensors(inputs) if one.requires_grad), None)
        if boundary is None:
            boundary = next((one for one in _tensors(inputs) if one.is_floating_point()), None)
        tracker = self._machine.tracker
        unit = MarkedUnit(name, tracker.live_bytes, 0, live=tracker.live_storages())
        if boundary is not None:
            storage = boundary.untyped_storage()
            unit.boundary, unit.boundary_bytes = storage._cdata, storage.nbytes()
            if storage._cdata in self.step.units[0].live:  # part of the batch, or a parameter
                unit.boundary_bytes = 0
        number = len(self.step.units)
        self.step.units.append(unit)
        if boundary is not None and boundary.requires_grad:
            boundary.register_hook(_Complete(self, number))  # type: ignore[no-untyped-call]

    def _end_forward(self) -> None:
        unit = self.step.units[-1]
        now = self._machine.now_ns
        unit.forward_ns += now - self._now
        unit.forward_peak_bytes = max(unit.forward_peak_bytes, self._machine.tracker.take_peak_bytes())
        self._now = now
        unit.forward_issue_ns += self._issued()

    def _issued(self) -> int:
        """The time in which the host issued what ran since the last call."""
        before, self._issued_ns = self._issued_ns, self._machine.issued_ns
        return self._issued_ns - before

    @contextlib.contextmanager
    def _backward(self) -> Iterator[None]:
        is_first = self.is_forward
        if is_first:
            self._end_forward()
            self.step.forward_end_bytes = self._machine.allocated_bytes
            self.step.forward_end_live = self._machine.tracker.live_storages()
            self._last_done = len(self.step.units)
        self._is_backward = True
        try:
            yield
        finally:
            if is_first:
                self.completed(max(0, self._last_done - 1))
            self._is_backward = False
            self.step.passes += 1

    def completed(self, number: int) -> None:
        """The gradient of a unit's input is complete."""
        if self.step.passes or not self._is_backward:
            return
        unit, now = self.step.units[number], self._machine.now_ns
        unit.backward_ns += now - self._now
        unit.backward_issue_ns += self._issued()
        unit.backward_peak_bytes = max(unit.backward_peak_bytes, self._machine.tracker.take_peak_bytes())
        self._now, self._last_done = now, min(self._last_done, number)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.is_forward and tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            key, number = storage._cdata, len(self.step.units) - 1
            parameter = self._parameters.get(key)
            if parameter is not None:
                self._use(parameter)
            else:
                self._note_shared(storage, number)
        return tensor.detach() if tensor.grad_fn is not None else tensor

    def _note_shared(self, storage: torch.UntypedStorage, number: int) -> None:
        """Notes a storage that an earlier unit made and this one saves, unless it is this unit's input."""
        units, key = self.step.units, storage._cdata
        held = self._machine.tracker.token_of(storage)
        is_older = held is not None and units[number].live.get(key) is held
        if not is_older or key == units[number].boundary or units[0].live.get(key) is held:
            return
        maker = next(i for i in range(number) if units[i + 1].live.get(key) is held)
        units[maker].shared[key] = storage.nbytes()

    def _used(self, module: torch.nn.Module, inputs: Any) -> None:
        if self.is_forward:
            for parameter in module.parameters(recurse=False):
                self._use(parameter)

    def _use(self, parameter: torch.Tensor) -> None:
        self.step.uses.setdefault(id(parameter), set()).add(len(self.step.units) - 1)

    def _gradient(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            self.step.gradients[id(parameter)] = sum(storage.nbytes() for storage in storages_of(parameter.grad))

    def _step_begins(self, *arguments: Any) -> None:
        self._step_began, self._step_began_issued_ns = self._machine.now_ns, self._machine.issued_ns

    def _step_ends(self, *arguments: Any) -> None:
        self.step.step_ns += self._machine.now_ns - self._step_began
        self.step.step_issue_ns += self._machine.issued_ns - self._step_began_issued_ns


@dataclass(frozen=True, slots=True)
class _Entered:
    watch: UnitWatch
    index: int

    def __call__(self, module: torch.nn.Module, inputs: Any, named: Any) -> None:
        self.watch.entered(self.index, (inputs, named))


@dataclass(frozen=True, slots=True)
class _Left:
    watch: UnitWatch
    index: int

    def __call__(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        self.watch.left(self.index, output)


@dataclass(frozen=True, slots=True)
class _Complete:
    watch: UnitWatch
    number: int

    def __call__(self, gradient: torch.Tensor) -> None:
        self.watch.completed(self.number)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [one for one in tree_leaves(tree) if isinstance(one, torch.Tensor)]


@contextlib.contextmanager
def _clipping_noted(step: MarkedStep) -> Iterator[None]:
    """Notes whether the step clips its gradients by their norm."""
    undo = replace_passes(_Noted(step))
    try:
        yield
    finally:
        undo()


@dataclass(frozen=True, slots=True)
class _Noted:
    """Torch's own functions on gradients, with a note of those that need the norm."""

    step: MarkedStep

    def clip_norm(self, own: Own, *args: Any, **kwargs: Any) -> Any:
        self.step.clips = True
        return own(*args, **kwargs)

    def clip_with_norm(self, own: Own, *args: Any, **kwargs: Any) -> Any:
        self.step.clips = True
        return own(*args, **kwargs)

    def clip_value(self, own: Own, *args: Any, **kwargs: Any) -> Any:
        return own(*args, **kwargs)

    def unscale(self, own: Own, *args: Any, **kwargs: Any) -> Any:
        return own(*args, **kwargs)
