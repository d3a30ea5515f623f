"""The cycle of a training under a placement: its tasks in order, the bytes that each needs, and the moves between them.

[Note: Memory] The device's memory is counted task by task and does not depend on time. `needed` are the bytes that have
to be there while a task runs. A move out gives its bytes back before a later task, its release, which waits for the
copy. A move in takes its memory from an earlier task on, its issue. Both take room that `needed` leaves under the
budget, so a cycle fits exactly if `needed` does.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from vdnn.planning.training.placement import Activations, Placement, State, StepTime
from vdnn.planning.training.training import Training


class ByteClass(Enum):
    """The class of a byte on the device."""

    ACTIVATION = "activations"
    PARAMETER = "parameters"
    GRADIENT = "gradients"
    STATE = "optimizer state"
    TRANSIENT = "transients"


class TaskKind(Enum):
    __hash__ = object.__hash__  # Enum's own is slow
    FORWARD = "forward"
    BACKWARD = "backward"
    STEP = "step"


class Task(NamedTuple):
    kind: TaskKind
    unit: int
    micro_batch: int
    duration_ns: int


@dataclass(slots=True)
class Move:
    """A copy to the host after task `after`, or to the device for task `need`, counted from the start of one cycle:
    beyond its end they are tasks of the next. A copy to the host is done when task `release` begins; one to the device
    has its memory from task `issue` on. `unit` waits for the unit's step or is waited for by it. `takes_room`: False
    for parameters that are written in place."""

    is_out: bool
    byte_class: ByteClass
    unit: int
    nbytes: int
    task: int  # after which, or for which
    earliest: int  # of a copy in: the first task at which its memory may be taken
    bound: int = 0  # release or issue
    takes_room: bool = True
    follows_step: bool = False  # a copy in that needs the stepped parameters
    feeds_step: bool = False  # a copy out that the step on the CPU needs
    brings_back: Move | None = None  # the copy out of the same bytes, which has to be done


@dataclass(slots=True)
class Cycle:
    """`needed_bytes[t]` are the bytes that task `t` needs, and `by_class` those of each class. `cpu_steps` are
    units, in the order of their steps."""

    tasks: list[Task]
    needed_bytes: list[int] = field(default_factory=list)
    by_class: dict[ByteClass, list[int]] = field(default_factory=dict)
    outs: list[Move] = field(default_factory=list)
    ins: list[Move] = field(default_factory=list)
    cpu_steps: list[int] = field(default_factory=list)
    host_bytes: int = 0

    @property
    def needed(self) -> list[dict[ByteClass, int]]:
        """The bytes that each task needs, by class."""
        return [dict(zip(self.by_class, one, strict=True)) for one in zip(*self.by_class.values(), strict=True)]


def parts_of(whole: int, count: int) -> list[int]:
    """Splits a number into parts that differ by at most one."""
    return [whole * (index + 1) // count - whole * index // count for index in range(count)]


def tasks_of(training: Training, placement: Placement, only: int | None = None) -> list[Task]:
    """All tasks of one cycle, in the order in which the device runs them. With `only`, the other units' optimizers step
    in one slice."""
    placement.require_for(training)
    units, tasks = training.units, []
    last = training.micro_batches - 1

    def steps(unit: int) -> list[Task]:
        if placement.units[unit].state is State.CPU or not units[unit].gradient_bytes:
            return []
        slices = placement.slices_of(units[unit]) if only in (None, unit) else 1
        return [Task(TaskKind.STEP, unit, last, part) for part in parts_of(units[unit].step_ns, slices)]

    if placement.step_time is StepTime.DEFERRED:
        for unit in range(len(units)):
            tasks += [*steps(unit), Task(TaskKind.FORWARD, unit, 0, units[unit].forward_ns)]
    for micro_batch in range(training.micro_batches):
        if micro_batch or placement.step_time is not StepTime.DEFERRED:
            tasks += [Task(TaskKind.FORWARD, i, micro_batch, unit.forward_ns) for i, unit in enumerate(units)]
        for i in reversed(range(len(units))):
            again = placement.units[i].activations in (Activations.RECOMPUTE, Activations.RECOMPUTE_FROM_HOST)
            duration_ns = units[i].backward_ns + (units[i].forward_ns if again else 0)
            tasks.append(Task(TaskKind.BACKWARD, i, micro_batch, duration_ns))
            if placement.step_time is StepTime.IN_BACKWARD and micro_batch == last:
                tasks += steps(i)
    if placement.step_time is StepTime.END:
        for unit in range(len(units)):
            tasks += steps(unit)
    return tasks


def cycle_of(
    training: Training, placement: Placement, only: int | None = None, tasks: list[Task] | None = None
) -> Cycle:
    """The cycle with its needs and moves. The moves have no release or issue yet: see cycle_with_room(). With `only`,
    it has the needs and moves of that unit alone. `tasks` are its tasks, if they are known."""
    return _Builder(training, placement, only, tasks or tasks_of(training, placement, only)).build()


class _Builder:
    def __init__(self, training: Training, placement: Placement, only: int | None, tasks: list[Task]) -> None:
        self.training, self.placement, self.only = training, placement, only
        self.cycle = Cycle(tasks)
        self.count = len(self.cycle.tasks)
        self.at: dict[tuple[TaskKind, int, int], list[int]] = {}
        for index, task in enumerate(self.cycle.tasks):
            self.at.setdefault((task.kind, task.unit, task.micro_batch), []).append(index)
        self.last_backward = max(i for i, task in enumerate(self.cycle.tasks) if task.kind is TaskKind.BACKWARD)
        self._change: dict[ByteClass, list[int]] = {one: [0] * (self.count + 1) for one in ByteClass}

    def build(self) -> Cycle:
        if self.only is None:
            self._hold(ByteClass.TRANSIENT, self.training.fixed_bytes, 0, self.count - 1)
        for unit in range(len(self.training.units)) if self.only is None else (self.only,):
            self._place_parameters(unit)
            self._place_activations(unit)
            self._place_gradient_and_state(unit)
        self._sum_up()
        steps = [unit for unit, one in enumerate(self.placement.units) if one.state is State.CPU]
        if not self.training.clips:
            steps.reverse()  # as their gradients come
        self.cycle.cpu_steps = [unit for unit in steps if self.training.units[unit].gradient_bytes]
        self.cycle.outs.sort(key=lambda move: move.task)
        self.cycle.ins.sort(key=lambda move: move.task)
        return self.cycle

    def _hold(self, byte_class: ByteClass, nbytes: int, first: int, last: int) -> None:
        """From task `first` to task `last`, both included; from the end on into the next cycle if `last` is beyond."""
        change = self._change[byte_class]
        if last - first + 1 >= self.count:
            first, last = 0, self.count - 1
        first, last = first % self.count, last % self.count
        change[first] += nbytes
        change[last + 1] -= nbytes
        if last < first:  # around the end
            change[0] += nbytes
            change[self.count] -= nbytes

    def _sum_up(self) -> None:
        for one, change in self._change.items():
            self.cycle.by_class[one] = list(itertools.accumulate(change[:-1]))
        self.cycle.needed_bytes = list(map(sum, zip(*self.cycle.by_class.values(), strict=True)))

    def _out(self, byte_class: ByteClass, unit: int, nbytes: int, after: int, *, feeds_step: bool = False) -> Move:
        move = Move(True, byte_class, unit, nbytes, after, 0, after + 1, feeds_step=feeds_step)
        if nbytes:
            self.cycle.outs.append(move)
        return move

    def _in(
        self,
        byte_class: ByteClass,
        unit: int,
        nbytes: int,
        need: int,
        earliest: int,
        *,
        brings_back: Move | None = None,
        follows_step: bool = False,
        takes_room: bool = True,
    ) -> None:
        """`need` and `earliest` may both be of the cycle before: they are brought into this one."""
        if nbytes:
            turns = need // self.count * self.count
            move = Move(False, byte_class, unit, nbytes, need - turns, earliest - turns, need - turns)
            move.follows_step, move.takes_room, move.brings_back = follows_step, takes_room, brings_back
            self.cycle.ins.append(move)

    def _place_parameters(self, index: int) -> None:
        unit, one = self.training.units[index], self.placement.units[index]
        if not unit.parameter_bytes:
            return
        uses = sorted(
            self.at[kind, index, micro][0]
            for kind in (TaskKind.FORWARD, TaskKind.BACKWARD)
            for micro in range(self.training.micro_batches)
        )
        steps = self.at.get((TaskKind.STEP, index, self.training.micro_batches - 1), [])
        if not one.streams:
            self._hold(ByteClass.PARAMETER, unit.parameter_bytes, 0, self.count - 1)
            if one.state is State.CPU:
                need = 0 if self.placement.forward_waits_for_steps or self.placement.delayed_update else uses[0]
                behind = self.last_backward if self.training.clips else uses[-1]
                earliest = behind + 1 - self.count
                self._in(
                    ByteClass.PARAMETER, index, unit.weight_bytes, need, earliest, follows_step=True, takes_room=False
                )
            return
        is_deferred = self.placement.step_time is StepTime.DEFERRED and bool(steps)
        for use, following in zip(uses, [*uses[1:], uses[0] + self.count], strict=True):
            wraps = following >= self.count
            self._hold(ByteClass.PARAMETER, unit.parameter_bytes, use, use)
            if following == use + 1 and not (wraps and one.state is State.CPU):
                continue
            if wraps and is_deferred:
                self._defer_parameters(index, steps, uses)
                continue
            earliest = use + 1
            if wraps and steps:
                earliest = max(earliest, steps[-1] + 1)
            elif wraps and one.state is State.CPU and self.training.clips:
                earliest = max(earliest, self.last_backward + 1)
            self._in(
                ByteClass.PARAMETER,
                index,
                unit.parameter_bytes,
                following,
                earliest,
                follows_step=bool(unit.gradient_bytes) and (wraps or is_deferred),
            )
        written = [] if is_deferred else steps  # each slice writes its part of the parameters, and the host gets it
        for step, part in zip(written, parts_of(unit.weight_bytes, len(steps) or 1), strict=False):
            self._hold(ByteClass.PARAMETER, part, step, step)
            self._out(ByteClass.PARAMETER, index, part, step)
            if unit.step_reads_weights:
                self._in(ByteClass.PARAMETER, index, part, step, uses[-1] + 1)
        self.cycle.host_bytes += unit.parameter_bytes

    def _defer_parameters(self, index: int, steps: list[int], uses: list[int]) -> None:
        """The step writes the parameters right before their forward: they stay for it, and leave after it."""
        unit, earliest = self.training.units[index], uses[-1] + 1 - self.count
        read = unit.weight_bytes if unit.step_reads_weights else 0
        self._hold(ByteClass.PARAMETER, unit.weight_bytes, steps[0], uses[0] - 1)
        self._in(ByteClass.PARAMETER, index, read, steps[0], earliest)
        self._in(ByteClass.PARAMETER, index, unit.frozen_bytes, uses[0], earliest)
        self._out(ByteClass.PARAMETER, index, unit.weight_bytes, uses[0])

    def _place_activations(self, index: int) -> None:
        unit, one = self.training.units[index], self.placement.units[index]
        again = one.activations in (Activations.RECOMPUTE, Activations.RECOMPUTE_FROM_HOST)
        moved = unit.boundary_bytes if again else unit.saved_bytes
        leaves = one.activations in (Activations.OFFLOAD, Activations.RECOMPUTE_FROM_HOST)
        for micro in range(self.training.micro_batches):
            forward = self.at[TaskKind.FORWARD, index, micro][0]
            backward = self.at[TaskKind.BACKWARD, index, micro][0]
            self._hold(ByteClass.TRANSIENT, unit.forward_transient_bytes, forward, forward)
            self._hold(ByteClass.TRANSIENT, unit.backward_transient_bytes, backward, backward)
            if again:
                self._hold(ByteClass.ACTIVATION, unit.saved_bytes - unit.boundary_bytes, backward, backward)
            if leaves and backward > forward + 1:
                self._hold(ByteClass.ACTIVATION, moved, forward, forward)
                self._hold(ByteClass.ACTIVATION, moved, backward, backward)
                left = self._out(ByteClass.ACTIVATION, index, moved, forward)
                self._in(ByteClass.ACTIVATION, index, moved, backward, forward + 1, brings_back=left)
            else:
                self._hold(ByteClass.ACTIVATION, moved, forward, backward)
        if leaves:
            self.cycle.host_bytes += moved

    def _place_gradient_and_state(self, index: int) -> None:
        unit, one = self.training.units[index], self.placement.units[index]
        if not unit.gradient_bytes:
            return
        backwards = [self.at[TaskKind.BACKWARD, index, micro][0] for micro in range(self.training.micro_batches)]
        steps = list(self.at.get((TaskKind.STEP, index, self.training.micro_batches - 1), []))
        if self.placement.step_time is StepTime.DEFERRED:
            steps = [step + self.count for step in steps]
        stays = not one.gradient_leaves or (bool(steps) and steps[0] == backwards[-1] + 1)
        if stays:
            last = steps[-1] if steps else backwards[-1]
            if one.gradient_leaves:
                self._leave_between(index, unit.gradient_bytes, backwards)
                self._hold(ByteClass.GRADIENT, unit.gradient_bytes, backwards[-1], last)
            else:
                self._hold(ByteClass.GRADIENT, unit.gradient_bytes, backwards[0], last)
        else:
            self._leave_between(index, unit.gradient_bytes, backwards)
            self._hold(ByteClass.GRADIENT, unit.gradient_bytes, backwards[-1], backwards[-1])
            left = self._out(
                ByteClass.GRADIENT, index, unit.gradient_bytes, backwards[-1], feeds_step=one.state is State.CPU
            )
            for step, part in zip(steps, parts_of(unit.gradient_bytes, len(steps) or 1), strict=False):
                self._hold(ByteClass.GRADIENT, part, step, step)
                self._in(ByteClass.GRADIENT, index, part, step, backwards[-1] + 1, brings_back=left)
            copies = (
                2 if self.placement.delayed_update and one.state is State.CPU else 1
            )  # one steps while the other is written
            self.cycle.host_bytes += copies * unit.gradient_bytes
        if one.state is State.DEVICE:
            self._hold(ByteClass.STATE, unit.state_bytes, 0, self.count - 1)
            return
        for late, part in zip(steps, parts_of(unit.state_bytes, len(steps) or 1), strict=False):
            step = late % self.count
            self._hold(ByteClass.STATE, part, step, step)
            left = self._out(ByteClass.STATE, index, part, step)
            self._in(ByteClass.STATE, index, part, step, step + 1 - self.count, brings_back=left)
        self.cycle.host_bytes += unit.state_bytes

    def _leave_between(self, index: int, nbytes: int, backwards: list[int]) -> None:
        """A gradient that accumulates on the host: to the device for each backward but the first, and out again."""
        for earlier, later in itertools.pairwise(backwards):
            self._hold(ByteClass.GRADIENT, nbytes, earlier, earlier)
            left = self._out(ByteClass.GRADIENT, index, nbytes, earlier)
            self._in(ByteClass.GRADIENT, index, nbytes, later, earlier + 1, brings_back=left)
