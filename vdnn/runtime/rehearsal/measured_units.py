"""Makes the units of a training from the marks of a watched step.

[Note: Bytes of units] What a unit saves is by how much more is allocated when it ends, with its input and without its
output, which is the input of the next. Tensors that it made for other units, such as a mask, and parameters that
several units use stay on the device, as part of the fixed bytes. A shared parameter's gradient belongs to the last unit
that uses it. A transient is what a unit's peak has in addition to what the cycle of a training with everything kept
counts, so that the peaks of both agree. Where a gradient takes the place of saves that are gone, the cycle counts both
and is higher.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from vdnn.hardware import HardwareProfile
from vdnn.planning.training.cycle import TaskKind, cycle_of
from vdnn.planning.training.placement import UnitPlacement, all_alike
from vdnn.planning.training.training import Training, Unit
from vdnn.runtime.rehearsal.unit_marks import MarkedStep

_FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True)
class ParameterState:
    """The state of one parameter of the model in its optimizer. `alike` are the elements of those tensors that have the
    parameter's shape, `other_bytes` those of the rest. `held_bytes` existed when the watched step began."""

    nbytes: int
    alike: int
    other_bytes: int
    held_bytes: int

    def in_float32(self, parameter: torch.Tensor) -> int:
        """The bytes of the same state in float32, with a master copy of the parameter."""
        return self.other_bytes + _FLOAT32_BYTES * (self.alike + parameter.numel())


@dataclass(frozen=True, slots=True)
class Held:
    """All that stays from step to step: parameters of the model, in order, and the state of those that have one.
    `gradient_bytes` are gradients that existed when the step began; `freed_bytes` of them were gone after the first
    unit."""

    parameters: Sequence[torch.nn.Parameter]
    states: dict[int, ParameterState]
    master_weights: bool = False
    gradient_bytes: int = 0
    freed_bytes: int = 0
    names: Mapping[int, str] = field(default_factory=dict)  # of the parameters, by id

    def state_bytes(self, parameter: torch.nn.Parameter) -> int:
        state = self.states.get(id(parameter))
        if state is None:
            return 0
        return state.in_float32(parameter) if self.has_master(parameter) else state.nbytes

    def has_master(self, parameter: torch.nn.Parameter) -> bool:
        return self.master_weights and parameter.dtype is not torch.float32 and id(parameter) in self.states


@dataclass(frozen=True, slots=True)
class UnitParameter:
    """One parameter of a unit: its name in the model, the size of its first dimension, 0 for a number, and its bytes.
    `is_shared`: several units use it, so that its own bytes are not the unit's."""

    name: str
    rows: int
    nbytes: int
    gradient_bytes: int
    state_bytes: int
    is_shared: bool


@dataclass(slots=True)
class _Owned:
    """The parameters, gradients and state of one unit."""

    weight_bytes: int = 0
    frozen_bytes: int = 0
    gradient_bytes: int = 0
    largest_gradient: int = 0
    state_bytes: int = 0
    step_bytes: int = 0  # that the step reads and writes
    reads_weights: bool = False
    parameters: list[UnitParameter] = field(default_factory=list)


def training_of_marks(
    name: str, marks: MarkedStep, held: Held, profile: HardwareProfile, *, micro_batches: int, clips: bool
) -> tuple[Training, int, tuple[tuple[UnitParameter, ...], ...]]:
    """The training, the peak of its cycle without optimizer state, in one micro-batch with everything kept, and the
    parameters of each unit."""
    owned, resident = _owned(marks, held)
    saved, boundaries, shared = _saves(marks, held.freed_bytes)
    fixed_bytes = marks.begin_bytes - resident - held.gradient_bytes + shared
    rate = profile.memory_bytes_per_s * profile.bandwidth_efficiency_of("elementwise")
    step_bytes = sum(one.step_bytes for one in owned)
    units = []
    for index, (marked, own) in enumerate(zip(marks.units, owned, strict=True)):
        step_ns = own.step_bytes / rate * 1e9
        if marks.step_ns:
            step_ns = marks.step_ns * own.step_bytes / max(1, step_bytes)
        units.append(
            Unit(
                name=marked.name,
                weight_bytes=own.weight_bytes,
                frozen_bytes=own.frozen_bytes,
                gradient_bytes=own.gradient_bytes,
                state_bytes=0,
                saved_bytes=saved[index],
                boundary_bytes=boundaries[index],
                forward_ns=marked.forward_ns,
                backward_ns=marked.backward_ns,
                forward_transient_bytes=0,
                backward_transient_bytes=0,
                step_ns=round(step_ns),
                host_step_bytes=own.step_bytes,
                step_reads_weights=own.reads_weights,
                forward_issue_ns=marked.forward_issue_ns,
                backward_issue_ns=marked.backward_issue_ns,
                step_issue_ns=round(marks.step_issue_ns * own.step_bytes / max(1, step_bytes)),
            )
        )
    bare = Training(name, tuple(units), 1, clips, max(0, fixed_bytes))
    held_state = sum(state.held_bytes for state in held.states.values())
    with_transients = _with_transients(bare, marks, held_state)
    peak = max(cycle_of(with_transients, all_alike(with_transients, UnitPlacement())).needed_bytes)
    accumulates = micro_batches > 1
    whole = tuple(
        replace(
            unit,
            state_bytes=own.state_bytes,
            backward_transient_bytes=unit.backward_transient_bytes + (own.largest_gradient if accumulates else 0),
        )
        for unit, own in zip(with_transients.units, owned, strict=True)
    )
    parameters = tuple(tuple(own.parameters) for own in owned)
    return replace(with_transients, units=whole, micro_batches=micro_batches), peak + held_state, parameters


def _owned(marks: MarkedStep, held: Held) -> tuple[list[_Owned], int]:
    """For each unit, and how many bytes of the step's begin are in them."""
    owned, resident, known = [_Owned() for _ in marks.units], 0, set()
    resident += sum(state.held_bytes for state in held.states.values())
    for parameter in held.parameters:
        storage = parameter.untyped_storage()
        if storage._cdata in known:
            continue
        known.add(storage._cdata)
        uses = marks.uses.get(id(parameter), set())
        gradient = marks.gradients.get(id(parameter), 0)
        one = owned[max(uses, default=0)]
        nbytes = storage.nbytes()
        state = held.state_bytes(parameter) if gradient else 0
        rows = parameter.shape[0] if parameter.dim() else 0
        name = held.names.get(id(parameter), "")
        one.parameters.append(UnitParameter(name, rows, nbytes, gradient, state, is_shared=len(uses) != 1))
        if len(uses) == 1:
            resident += nbytes
            if gradient:
                one.weight_bytes += nbytes
            else:
                one.frozen_bytes += nbytes
        if gradient:
            has_master = held.has_master(parameter)
            one.gradient_bytes += gradient
            one.largest_gradient = max(one.largest_gradient, gradient)
            one.state_bytes += state
            one.step_bytes += 2 * state + gradient + nbytes * (1 if has_master else 2)
            one.reads_weights = one.reads_weights or not has_master
    return owned, resident


def _saves(marks: MarkedStep, freed_bytes: int) -> tuple[list[int], list[int], int]:
    """The saved bytes of each unit, those of its input, and the bytes of what units made for others."""
    units, count = marks.units, len(marks.units)
    boundaries = [unit.boundary_bytes for unit in units]
    for index in range(1, count):
        key, before = units[index].boundary, units[index - 1]
        # An input that is older than the unit before, or that others save too, stays where it is counted.
        if key is not None and (before.live.get(key) is units[index].live.get(key) or key in before.shared):
            boundaries[index] = 0
    begins = [*(unit.begin_bytes for unit in units), marks.forward_end_bytes]
    begins[0] -= freed_bytes
    outputs = [*boundaries[1:], 0]
    saved, shared = [], 0
    for index, unit in enumerate(units):
        made_for_others = sum(unit.shared.values())
        more = begins[index + 1] - begins[index] + boundaries[index] - outputs[index] - made_for_others
        saved.append(max(more, boundaries[index], 0))
        shared += made_for_others
    return saved, boundaries, shared


def _with_transients(bare: Training, marks: MarkedStep, held_state: int) -> Training:
    """See [Note: Bytes of units]."""
    cycle = cycle_of(bare, all_alike(bare, UnitPlacement()))
    needed = {(task.kind, task.unit): nbytes for task, nbytes in zip(cycle.tasks, cycle.needed_bytes, strict=True)}
    units = []
    for index, (unit, marked) in enumerate(zip(bare.units, marks.units, strict=True)):
        following = marks.units[index + 1].live if index + 1 < len(marks.units) else marks.forward_end_live
        is_saved = marked.boundary is None or marked.live.get(marked.boundary) is following.get(marked.boundary)
        # A recompute needs the input that backward does not need otherwise.
        more = 0 if is_saved else unit.boundary_bytes
        forward = marked.forward_peak_bytes - held_state - needed[TaskKind.FORWARD, index]
        backward = marked.backward_peak_bytes - held_state - needed[TaskKind.BACKWARD, index]
        units.append(
            replace(unit, forward_transient_bytes=max(0, forward), backward_transient_bytes=max(0, backward) + more)
        )
    return replace(bare, units=tuple(units))
