"""Executes the plan of a whole training on a device in virtual time, as a program of streams and events.

The program issues the tasks in their order, as a runtime would. Computing waits for the copies that it needs, and for
copies to the host whose memory it takes over. A copy waits for the task that gives it its memory or bytes, and a step
on the CPU for its gradient. The program does not know how the plan was simulated, and has to give the same times.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from benchmarks.whole_state.shared_device import MachineEngine, SharedDevice, StreamPoint
from vdnn.planning.training.cycle import ByteClass, Cycle, Move, TaskKind
from vdnn.planning.training.placement import Placement
from vdnn.planning.training.simulate_cycle import cycle_with_room
from vdnn.planning.training.training import Training, TrainingMachine

_STEPS = 12


@dataclass(frozen=True, slots=True)
class ExecutedTraining:
    """`ends_ns` are the ends of the steps, and `peak_bytes` the most that was allocated when a task began. The other
    bytes are those that the tasks of one step received and left, and that the cores stepped."""

    ends_ns: tuple[float, ...]
    peak_bytes: int
    to_device_bytes: int
    to_host_bytes: int
    cpu_step_bytes: int

    @property
    def step_ns(self) -> int:
        """The time of a step once step follows step evenly. Steps of different times may come in turn: then the mean of
        the last eight."""
        ends = self.ends_ns
        for index in range(2, len(ends)):
            last, before = ends[index] - ends[index - 1], ends[index - 1] - ends[index - 2]
            if abs(last - before) <= max(1.0, 1e-7 * last):
                return round(last)
        return round((ends[-1] - ends[-9]) / 8)

    @property
    def outcome(self) -> tuple[int, int, int, int]:
        """Time, memory, bytes to the device and bytes to the host: those of a simulated step are the same."""
        return self.step_ns, self.peak_bytes, self.to_device_bytes, self.to_host_bytes


def execute_training(
    training: Training, machine: TrainingMachine, placement: Placement, budget_bytes: int, steps: int = _STEPS
) -> ExecutedTraining:
    """Issues `steps` steps, and runs them."""
    cycle = cycle_with_room(training, machine, placement, budget_bytes)
    program = _Program(training, SharedDevice(machine), placement, cycle)
    ends = [program.issue_step(turn) for turn in range(steps)]
    device = program.device
    device.run()
    moved = device.moved_bytes
    return ExecutedTraining(
        tuple(device.time_ns(end) for end in ends),
        program.peak_bytes,
        program.arrived_bytes // steps,
        moved[MachineEngine.TO_HOST] // steps,
        moved[MachineEngine.CPU] // steps,
    )


class _Program:
    """Issues step after step. Memory belongs to a copy to the device from the task on at which it is issued, and to one
    to the host until the task that takes it over."""

    def __init__(self, training: Training, device: SharedDevice, placement: Placement, cycle: Cycle) -> None:
        self.training, self.device, self.placement, self.cycle = training, device, placement, cycle
        self.count = len(cycle.tasks)
        self.peak_bytes = 0
        self.arrived_bytes = 0
        self._compute, self._in, self._out, self._cpu = (device.create_stream() for _ in range(4))
        self._last_backward = max(i for i, task in enumerate(cycle.tasks) if task.kind is TaskKind.BACKWARD)
        self._steps_first = cycle.tasks[0].kind is TaskKind.STEP
        self._allocated: defaultdict[int, int] = defaultdict(int)  # changes of memory, by task of all steps
        self._moving_bytes = 0
        self._releases: defaultdict[int, list[StreamPoint]] = defaultdict(list)
        self._arrivals: defaultdict[int, list[tuple[int, StreamPoint]]] = defaultdict(list)
        self._begun: list[StreamPoint] = []  # the moments at which tasks have their memory
        self._left: dict[tuple[int, int], StreamPoint] = {}  # copies to the host, by their move and step
        self._fed: dict[tuple[int, int], StreamPoint] = {}  # gradients on the host, by unit and step
        self._written: defaultdict[tuple[int, int], list[StreamPoint]] = defaultdict(list)  # parameters, likewise
        self._stepped: dict[tuple[int, int], StreamPoint] = {}  # on the CPU, by unit and step
        self._turn_in = self._place_in = 0
        for turn in range(_STEPS + 1):
            for move in cycle.ins:
                first, last = turn * self.count + move.bound, turn * self.count + move.task
                if move.takes_room and last > max(first, 0):
                    self._allocated[max(first, 0)] += move.nbytes
                    self._allocated[last] -= move.nbytes  # from here on its task needs it

    def issue_step(self, turn: int) -> StreamPoint:
        for place, task in enumerate(self.cycle.tasks):
            now = turn * self.count + place
            for event in self._releases.pop(now, ()):
                self.device.wait(self._compute, event)
            self._moving_bytes += self._allocated.pop(now, 0)
            self.peak_bytes = max(self.peak_bytes, self.cycle.needed_bytes[place] + self._moving_bytes)
            self._begun.append(self.device.record(self._compute))
            self._issue_ins(now)
            for nbytes, event in self._arrivals.pop(now, ()):
                self.arrived_bytes += nbytes
                self.device.wait(self._compute, event)
            self.device.compute(self._compute, task.duration_ns)
            done = self.device.record(self._compute)
            self._issue_outs(turn, place, done)
            if place == self._last_backward or not self.training.clips:
                self._issue_cpu_steps(turn, done)
        return done

    def _issue_ins(self, now: int) -> None:
        """Those in the order of the plan that may be issued at this task."""
        while self.cycle.ins:
            move, turn = self.cycle.ins[self._place_in], self._turn_in
            first = turn * self.count + move.bound
            followed = self._what_it_follows(move, turn) if first <= now else None
            if followed is None:
                return
            if first >= 0:
                self.device.wait(self._in, self._begun[first])
            for event in followed:
                self.device.wait(self._in, event)
            self.device.copy(self._in, MachineEngine.TO_DEVICE, move.nbytes)
            self._arrivals[turn * self.count + move.task].append((move.nbytes, self.device.record(self._in)))
            self._place_in += 1
            if self._place_in == len(self.cycle.ins):
                self._place_in, self._turn_in = 0, turn + 1

    def _what_it_follows(self, move: Move, turn: int) -> list[StreamPoint] | None:
        """The bytes are on the host first, and the parameters are those of the step before. None if that is still to be
        issued."""
        before, found = move.brings_back, []
        if before is not None:
            when = turn if before.task < move.task else turn - 1
            found += [self._left[id(before), when]] if when >= 0 else []
        if not move.follows_step:
            return found
        if move.unit not in self.cycle.cpu_steps:
            return found + self._written.get((move.unit, turn - 1 + self._steps_first), [])
        when = turn - 1 - self.placement.delayed_update
        awaited = self.cycle.cpu_steps if self.placement.forward_waits_for_steps else [move.unit]
        steps = [(unit, when) for unit in awaited]
        if when < 0:
            return found
        return found + [self._stepped[one] for one in steps] if all(one in self._stepped for one in steps) else None

    def _issue_outs(self, turn: int, place: int, done: StreamPoint) -> None:
        for move in self.cycle.outs:
            if move.task != place:
                continue
            self.device.wait(self._out, done)
            self.device.copy(self._out, MachineEngine.TO_HOST, move.nbytes)
            event = self._left[id(move), turn] = self.device.record(self._out)
            self._releases[turn * self.count + move.bound].append(event)
            if move.bound > place + 1:
                self._allocated[turn * self.count + place + 1] += move.nbytes
                self._allocated[turn * self.count + move.bound] -= move.nbytes
            if move.feeds_step:
                self._fed[move.unit, turn] = event
            if move.byte_class is ByteClass.PARAMETER:
                self._written[move.unit, turn].append(event)

    def _issue_cpu_steps(self, turn: int, done: StreamPoint) -> None:
        """Those whose gradients are on their way: with clipping, when backward has ended."""
        for unit in self.cycle.cpu_steps:
            if (unit, turn) in self._stepped:
                continue
            if (unit, turn) not in self._fed:
                return
            if self.training.clips:
                self.device.wait(self._cpu, done)
            self.device.wait(self._cpu, self._fed[unit, turn])
            self.device.step_on_cpu(self._cpu, self.training.units[unit].host_step_bytes)
            self._stepped[unit, turn] = self.device.record(self._cpu)
