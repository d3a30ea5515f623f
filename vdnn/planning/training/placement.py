"""Placement: the plan of a whole training. For each unit it says where its bytes live and where its optimizer steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from vdnn.errors import InvalidArgumentError
from vdnn.planning.training.training import Training, Unit

LEAST_SLICE = 128 << 20  # of the optimizer's state, in bytes


class Activations(Enum):
    """How the saves of a unit's forward pass are handled."""

    __hash__ = object.__hash__  # Enum's own is slow
    KEEP = "keep"
    OFFLOAD = "offload"
    RECOMPUTE = "recompute"  # from the unit's input, which stays
    RECOMPUTE_FROM_HOST = "recompute, input offloaded"


class State(Enum):
    """The home of an optimizer's state, and with it the place of its step."""

    __hash__ = object.__hash__
    DEVICE = "device"
    HOST = "host"  # brought to the device for its step
    CPU = "cpu"  # steps on the host: other bits than on the device


class StepTime(Enum):
    """The moment of an optimizer's step."""

    END = "after backward"
    IN_BACKWARD = "in backward"  # right after the unit's gradient: not with exact clipping
    DEFERRED = "before the next forward"


@dataclass(frozen=True, slots=True)
class UnitPlacement:
    """`streams`: the parameters are on the device only for the unit's forward and backward. `gradient_leaves`: the
    gradient waits for its step on the host."""

    activations: Activations = Activations.KEEP
    streams: bool = False
    gradient_leaves: bool = False
    state: State = State.DEVICE

    def __post_init__(self) -> None:
        if self.state is State.CPU and not self.gradient_leaves:
            raise InvalidArgumentError(
                argument="gradient_leaves", expected="True for a step on the CPU", got=str(self.gradient_leaves)
            )


@dataclass(frozen=True, slots=True)
class Placement:
    """A unit's optimizer steps in slices of at most `slice_bytes` of state.

    * `overlap`: a copy to the host overlaps with at least this many tasks, if there is room.
    * `room_share_of_steps`, `room_share_of_passes`: copies to the host that follow an optimizer's step, or a forward or
      backward, may be spread over later tasks while their bytes take up to this share of the free room. The share that
      they get grows from the first task of a phase to its last.
    * `forward_waits_for_steps`: no forward begins before all steps on the CPU are done and the parameters of them that
      stay on the device are back, as in programs whose step() returns when all is done.
    * `delayed_update`: parameters that step on the CPU are those of one step earlier, so the step overlaps with a whole
      forward and backward. That is another training, and no search of vdnn plans it.
    * `room_bytes`: copies take room up to these bytes, also if the budget is larger. A plan that was made for a smaller
      budget and is as fast under a larger one keeps its own."""

    units: tuple[UnitPlacement, ...]
    step_time: StepTime = StepTime.END
    slice_bytes: int = 256 << 20
    overlap: int = 1
    room_share_of_steps: float = 0.0
    room_share_of_passes: float = 0.0
    forward_waits_for_steps: bool = False
    delayed_update: bool = False
    room_bytes: int | None = None

    def room_of(self, budget_bytes: int) -> int:
        return budget_bytes if self.room_bytes is None else min(self.room_bytes, budget_bytes)

    def slices_of(self, unit: Unit) -> int:
        return max(1, -(-unit.state_bytes // self.slice_bytes))

    def require_for(self, training: Training) -> None:
        if len(self.units) != len(training.units):
            raise InvalidArgumentError(
                argument="placement", expected=f"{len(training.units)} units", got=str(len(self.units))
            )
        if training.clips and self.step_time is StepTime.IN_BACKWARD:
            raise InvalidArgumentError(
                argument="step_time",
                expected="a step after the whole backward, because the gradients are clipped by their norm",
                got=self.step_time.value,
            )


@dataclass(frozen=True, slots=True)
class Allowed:
    """The freedoms of a plan, beyond moving bytes. A step on the CPU has other bits, and a deferred one has to be asked
    for."""

    cpu_steps: bool = False
    deferred: bool = False
    in_backward: bool = False

    def step_times(self, training: Training) -> list[StepTime]:
        times = [StepTime.END]
        if self.deferred:
            times.append(StepTime.DEFERRED)
        if self.in_backward and not training.clips:
            times.append(StepTime.IN_BACKWARD)
        return times

    def permits(self, placement: Placement, training: Training) -> bool:
        steps_on_cpu = any(unit.state is State.CPU for unit in placement.units)
        return placement.step_time in self.step_times(training) and (self.cpu_steps or not steps_on_cpu)


EXACT = Allowed()


def unit_choices(training: Training, index: int, allowed: Allowed) -> list[UnitPlacement]:
    """All placements of one unit that differ in anything."""
    unit = training.units[index]
    activations = [Activations.KEEP, Activations.OFFLOAD] if unit.saved_bytes else [Activations.KEEP]
    if unit.saved_bytes > unit.boundary_bytes:  # else a recompute saves nothing
        activations += [Activations.RECOMPUTE, Activations.RECOMPUTE_FROM_HOST]
    streams = (False, True) if unit.parameter_bytes else (False,)
    states = [(False, State.DEVICE)]
    if unit.gradient_bytes:
        states += [(True, State.DEVICE), (False, State.HOST), (True, State.HOST)]
        states += [(True, State.CPU)] if allowed.cpu_steps else []
    return [
        UnitPlacement(fate, stream, leaves, state)
        for fate in activations
        for stream in streams
        for leaves, state in states
    ]


def all_alike(training: Training, unit: UnitPlacement, step_time: StepTime = StepTime.END) -> Placement:
    return Placement((unit,) * len(training.units), step_time)


def with_unit(units: Sequence[UnitPlacement], index: int, changed: UnitPlacement) -> tuple[UnitPlacement, ...]:
    return (*units[:index], changed, *units[index + 1 :])
