"""The readable form of csrc/planning/training_cycle.h: simulates the cycle of a training until steps are even.

Tasks run one after another on the device. Each copy engine does its copies in order, and so do the cores with their
steps. Copies of both directions share the link, and all of them share the host's memory with the steps on the CPU:
where their rates add up to more than there is, each gets its part. The host is far enough ahead.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from tests.planning.reference.training_room import give_room
from vdnn.planning.training.cycle import ByteClass, Cycle, Move, Task, TaskKind, cycle_of
from vdnn.planning.training.placement import Placement
from vdnn.planning.training.simulate_cycle import Span
from vdnn.planning.training.training import Training, TrainingMachine

# Cycles are simulated until two of them take equally long, but no more than _CYCLES.
_CYCLES = 12
_EVEN_NS = 1.0
_EVEN = 1e-7
_IN, _OUT, _CPU = 0, 1, 2  # the engines


class SimulatedCycle(NamedTuple):
    """`held[t]` are the bytes on the device during task `t`. Moves are by their bytes, task and release or issue, and
    copies to the device in the order of issue."""

    step_ns: float
    held: list[int]
    outs: list[tuple[int, int, int]]
    ins: list[tuple[int, int, int]]
    spans: list[Span]


def simulated_cycle(
    training: Training, machine: TrainingMachine, placement: Placement, budget_bytes: int
) -> SimulatedCycle:
    cycle = cycle_of(training, placement)
    held = give_room(cycle, machine, placement, placement.room_of(budget_bytes))
    clock = _Clock(training, machine, placement, cycle)
    ends = clock.run()
    # Cycles of different times may come in turn: then the mean of them.
    counted = 1 if _is_even(ends) else len(ends) - 4
    outs, ins = ([(one.nbytes, one.task, one.bound) for one in moves] for moves in (cycle.outs, cycle.ins))
    return SimulatedCycle((ends[-1] - ends[-1 - counted]) / counted, held, outs, ins, clock.spans(ends[-2]))


def _is_even(ends: list[float]) -> bool:
    """True if the last two cycles took equally long."""
    if len(ends) < 3:
        return False
    last, before = ends[-1] - ends[-2], ends[-2] - ends[-3]
    return abs(last - before) <= max(_EVEN_NS, _EVEN * last)


class _Clock:
    """Three engines do one thing at a time: copies to the device, copies to the host, and steps on the CPU. For each:
    what it does in a cycle, which of those it does now, in which cycle, how many bytes are left, and its rate now."""

    def __init__(self, training: Training, machine: TrainingMachine, placement: Placement, cycle: Cycle) -> None:
        self.placement = placement
        self.training, self.cycle, self.count = training, cycle, len(cycle.tasks)
        link = machine.link
        self.duplex, self.host_rate = link.duplex_bytes_per_s / 1e9, machine.host_bytes_per_s / 1e9
        cpu_rate = min(machine.cpu_bytes_per_s, machine.host_bytes_per_s) / 1e9
        self.alone = (link.to_device_bytes_per_s / 1e9, link.to_host_bytes_per_s / 1e9, cpu_rate)
        self.queues: tuple[list[Move], list[Move], list[int]] = (cycle.ins, cycle.outs, cycle.cpu_steps)
        self.sizes = (
            [move.nbytes + link.latency_ns * self.alone[_IN] for move in cycle.ins],
            [move.nbytes + link.latency_ns * self.alone[_OUT] for move in cycle.outs],
            [float(training.units[unit].host_step_bytes) for unit in cycle.cpu_steps],
        )
        self.position, self.turn = [0, 0, 0], [0, 0, 0]
        self.left, self.rate, self.began = [0.0] * 3, [0.0] * 3, [0.0] * 3
        self.busy = [False] * 3
        self._count_pending()
        units = len(training.units)
        self.feeding = [0] * units  # copies out that a step on the CPU waits for, done so far
        self.stepped_outs, self.cpu_done, self.step_outs = [0] * units, [0] * units, [0] * units
        self.completed = Counter[int]()  # times that a copy out was done, by its identity
        for move in cycle.outs:
            self.step_outs[move.unit] += move.byte_class is ByteClass.PARAMETER
        self.last_backward = max(i for i, task in enumerate(cycle.tasks) if task.kind is TaskKind.BACKWARD)
        self.on_cpu = set(cycle.cpu_steps)
        # A deferred step of a cycle writes the parameters of this cycle, any other those of the next.
        self.steps_first = cycle.tasks[0].kind is TaskKind.STEP
        self.log: list[Span] = []

    def _count_pending(self) -> None:
        """For each task of all cycles, the copies that have to be done before it begins."""
        count, ins = self.count, [0] * self.count
        for move in self.cycle.ins:
            ins[move.task] += 1
        first, outs = [0] * count, [0] * count
        for move in self.cycle.outs:
            outs[move.bound % count] += 1
            first[move.bound % count] += move.bound < count
        self.pending_ins = ins * _CYCLES
        self.pending_outs = first + outs * (_CYCLES + 1)

    def run(self) -> list[float]:
        """Runs cycles until two take equally long. Returns the time at which each has ended."""
        now, entered, done, compute_end, count = 0.0, 0, 0, -1.0, self.count
        total, ends = count * _CYCLES, []
        tasks, began, ended = self.cycle.tasks, 0.0, False
        durations = [task.duration_ns for task in tasks]
        pending_ins, pending_outs, busy, rate, left = (
            self.pending_ins,
            self.pending_outs,
            self.busy,
            self.rate,
            self.left,
        )
        engines = [engine for engine in (_IN, _OUT, _CPU) if self.queues[engine]]
        while True:
            changed = False
            while True:  # all that can begin now
                if entered == done and entered < total and not pending_outs[entered]:
                    entered += 1  # its memory is free: what is issued here may begin
                if compute_end < 0 and entered == done + 1 and not pending_ins[done]:
                    began, compute_end = now, now + durations[done % count]
                begun = False
                for engine in engines:
                    if not busy[engine] and self.turn[engine] < _CYCLES and self._may_begin(engine, entered, done):
                        left[engine], self.began[engine] = self.sizes[engine][self.position[engine]], now
                        busy[engine] = begun = True
                changed |= begun
                if compute_end < 0 or compute_end > now:
                    if not begun:
                        break
                    continue
                self.log.append(Span("device", self._name_of(tasks[done % count]), began, now))
                compute_end, done = -1.0, done + 1
                if done % count == 0:
                    ends.append(now)
                    if done == total or _is_even(ends):
                        return ends
            if changed or ended:
                self._share()
            step = compute_end - now if compute_end >= 0 else -1.0
            is_task = step >= 0
            for engine in engines:
                if busy[engine] and (step < 0 or left[engine] < step * rate[engine]):
                    step, is_task = max(0.0, left[engine] / rate[engine]), False
            if step < 0:
                raise RuntimeError("simulated_cycle: expected something that runs, got tasks and copies that wait")
            now = compute_end if is_task else now + step
            ended = False
            for engine in engines:
                if busy[engine]:
                    left[engine] -= rate[engine] * step
                    if left[engine] <= 1e-6:
                        self._end(engine, now)
                        ended = True

    def spans(self, begin_ns: float) -> list[Span]:
        return [
            Span(one.row, one.name, one.begin_ns - begin_ns, one.end_ns - begin_ns)
            for one in self.log
            if one.end_ns > begin_ns
        ]

    def _name_of(self, task: Task) -> str:
        return f"{task.kind.value} of {self.training.units[task.unit].name}"

    def _may_begin(self, engine: int, entered: int, done: int) -> bool:
        turn, position = self.turn[engine], self.position[engine]
        first = turn * self.count
        if engine == _OUT:
            return done > first + self.cycle.outs[position].task
        if engine == _CPU:
            ready = done > first + self.last_backward if self.training.clips else True
            return ready and self.feeding[self.cycle.cpu_steps[position]] > turn
        move = self.cycle.ins[position]
        if entered <= first + move.bound:
            return False
        before = move.brings_back
        if before is not None and self.completed[id(before)] < turn + (before.task < move.task):
            return False
        return not move.follows_step or self._has_stepped(move.unit, turn)

    def _has_stepped(self, unit: int, turn: int) -> bool:
        """True if the parameters of the step before are whole: their step on the CPU, or its copies out, are done."""
        if unit in self.on_cpu:
            turn -= self.placement.delayed_update
            return all(
                self.cpu_done[one] >= turn
                for one in (self.on_cpu if self.placement.forward_waits_for_steps else (unit,))
            )
        return self.stepped_outs[unit] >= self.step_outs[unit] * (turn + self.steps_first)

    def _end(self, engine: int, now: float) -> None:
        turn, position = self.turn[engine], self.position[engine]
        self.busy[engine] = False
        self.position[engine] += 1
        if self.position[engine] == len(self.queues[engine]):
            self.position[engine], self.turn[engine] = 0, turn + 1
        if engine == _CPU:
            unit = self.cycle.cpu_steps[position]
            self.cpu_done[unit] += 1
            name = f"step of {self.training.units[unit].name}"
        else:
            move = self.cycle.outs[position] if engine == _OUT else self.cycle.ins[position]
            if engine == _OUT:
                self.pending_outs[turn * self.count + move.bound] -= 1
                self.completed[id(move)] += 1
                self.feeding[move.unit] += move.feeds_step
                self.stepped_outs[move.unit] += move.byte_class is ByteClass.PARAMETER
            else:
                self.pending_ins[turn * self.count + move.task] -= 1
            name = f"{move.byte_class.value} of {self.training.units[move.unit].name}"
        row = ("to device", "to host", "cpu")[engine]
        self.log.append(Span(row, name, self.began[engine], now))

    def _share(self) -> None:
        """Sets the rates of what runs now."""
        into, out, cpu = (alone if is_busy else 0.0 for alone, is_busy in zip(self.alone, self.busy, strict=True))
        if into and out and into + out > self.duplex:
            factor = self.duplex / (into + out)
            into, out = into * factor, out * factor
        traffic = into + out + cpu
        if traffic > self.host_rate:
            factor = self.host_rate / traffic
            into, out, cpu = into * factor, out * factor, cpu * factor
        self.rate[:] = into, out, cpu
