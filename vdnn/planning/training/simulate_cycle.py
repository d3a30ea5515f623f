"""Simulates the cycle of a training until step follows step evenly: the time of a step, and what each resource did.

Tasks run one after another on the device. Each copy engine does its copies in order, and so do the cores with their
steps. Copies of both directions share the link, and all of them share the host's memory with the steps on the CPU:
where their rates add up to more than there is, each gets its part.
"""

from __future__ import annotations

from dataclasses import dataclass

from vdnn.planning.training.cycle import ByteClass, Cycle, Move, Task, TaskKind, cycle_of
from vdnn.planning.training.placement import Placement
from vdnn.planning.training.room import give_room
from vdnn.planning.training.training import Training, TrainingMachine

# So many cycles are simulated: few, and more if the last of those did not take as long as the one before.
_CYCLES = (3, 5, 12)
_EVEN_NS = 1.0


@dataclass(frozen=True, slots=True)
class Span:
    """One task, copy or step on the CPU of the last cycle. Times are from the start of that cycle."""

    row: str  # "device", "to host", "to device" or "cpu"
    name: str
    begin_ns: float
    end_ns: float


@dataclass(frozen=True, slots=True)
class TrainingStep:
    """A simulated step. `held[t]` are the bytes on the device during task `t`, `needed[t]` those of them that it needs,
    by class; the others are on their way."""

    placement: Placement
    step_ns: int
    computing_ns: int
    peak_bytes: int
    host_bytes: int
    to_device_bytes: int
    to_host_bytes: int
    cpu_step_bytes: int
    held: tuple[int, ...]
    needed: tuple[dict[ByteClass, int], ...]
    task_names: tuple[str, ...]
    spans: tuple[Span, ...] = ()

    @property
    def slowdown(self) -> float:
        return self.step_ns / self.computing_ns if self.computing_ns else 1.0


def simulate_training(
    training: Training, machine: TrainingMachine, placement: Placement, budget_bytes: int, *, with_spans: bool = False
) -> TrainingStep:
    """Simulates steps under a placement. Where it needs more than the budget, moves take no further room, and
    `peak_bytes` says how much it needs."""
    cycle = cycle_of(training, placement)
    held = give_room(cycle, machine, budget_bytes)
    for cycles in _CYCLES:
        clock = _Clock(training, machine, cycle, cycles, with_spans)
        ends = clock.run()
        if abs((ends[-1] - ends[-2]) - (ends[-2] - ends[-3])) <= _EVEN_NS:
            step_ns = ends[-1] - ends[-2]
            break
    else:  # cycles of different times in turn: their mean
        step_ns = (ends[-1] - ends[3]) / (len(ends) - 4)
    return TrainingStep(
        placement=placement,
        step_ns=round(step_ns),
        computing_ns=training.computing_ns,
        peak_bytes=max(held),
        host_bytes=cycle.host_bytes,
        to_device_bytes=sum(move.nbytes for move in cycle.ins),
        to_host_bytes=sum(move.nbytes for move in cycle.outs),
        cpu_step_bytes=sum(training.units[unit].host_step_bytes for unit in cycle.cpu_steps),
        held=tuple(held),
        needed=tuple(cycle.needed),
        task_names=tuple(f"{task.kind.value} of {training.units[task.unit].name}" for task in cycle.tasks),
        spans=tuple(clock.spans(ends[-2])) if with_spans else (),
    )


@dataclass(slots=True)
class _Engine:
    """One resource that does one thing at a time. `left` are bytes; `alone` is its rate without others, in bytes a
    nanosecond, and `traffic` what each of its bytes moves in the host's memory."""

    row: str
    alone: float
    queue: list[tuple[int, Move | int]]  # cycle, and a move or a unit that steps
    position: int = 0
    left: float = 0.0
    rate: float = 0.0
    began: float = 0.0
    is_busy: bool = False


class _Clock:
    def __init__(
        self, training: Training, machine: TrainingMachine, cycle: Cycle, cycles: int, with_spans: bool
    ) -> None:
        self.with_spans, self.cycles = with_spans, cycles
        self.training, self.cycle, self.count = training, cycle, len(cycle.tasks)
        link = machine.link
        self.latency_ns, self.duplex = link.latency_ns, link.duplex_bytes_per_s / 1e9
        self.host_rate = machine.host_bytes_per_s / 1e9
        turns = range(cycles)
        self.to_device = _Engine(
            "to device", link.to_device_bytes_per_s / 1e9, [(turn, move) for turn in turns for move in cycle.ins]
        )
        self.to_host = _Engine(
            "to host", link.to_host_bytes_per_s / 1e9, [(turn, move) for turn in turns for move in cycle.outs]
        )
        self.cpu = _Engine(
            "cpu",
            min(machine.cpu_bytes_per_s, machine.host_bytes_per_s) / 1e9,
            [(turn, unit) for turn in turns for unit in cycle.cpu_steps],
        )
        self.engines = (self.to_device, self.to_host, self.cpu)
        total = self.count * (cycles + 1) + 1
        self.pending_ins, self.pending_outs = [0] * total, [0] * total
        for turn in turns:
            for move in cycle.ins:
                self.pending_ins[turn * self.count + move.task] += 1
            for move in cycle.outs:
                move.completed = 0
                self.pending_outs[min(turn * self.count + move.bound, total - 1)] += 1
        self.feeding = [0] * len(training.units)  # copies out that a step on the CPU waits for, done so far
        self.stepped_outs = [0] * len(training.units)
        self.cpu_done = [0] * len(training.units)
        self.step_outs = [0] * len(training.units)
        for move in cycle.outs:
            if move.byte_class is ByteClass.PARAMETER:
                self.step_outs[move.unit] += 1
        backwards = [i for i, task in enumerate(cycle.tasks) if task.kind is TaskKind.BACKWARD]
        self.last_backward = backwards[-1]
        self.on_cpu = set(cycle.cpu_steps)
        # A deferred step of a cycle writes the parameters of this cycle, any other those of the next.
        self.steps_first = [cycle.tasks[0].kind is TaskKind.STEP] * len(training.units)
        self.log: list[Span] = []

    def run(self) -> list[float]:
        """Runs all cycles. Returns the time at which each has ended."""
        now, entered, done, compute_end = 0.0, 0, 0, -1.0
        total, ends = self.count * self.cycles, []
        tasks, began, ended = self.cycle.tasks, 0.0, False
        while True:
            changed = False
            while True:  # all that can begin now
                if entered == done and entered < total and not self.pending_outs[entered]:
                    entered += 1  # its memory is free: what is issued here may begin
                if compute_end < 0 and entered == done + 1 and not self.pending_ins[done]:
                    began, compute_end = now, now + tasks[done % self.count].duration_ns
                begun = False
                for engine in self.engines:
                    if not engine.is_busy and engine.position < len(engine.queue):
                        begun |= self._begin(engine, now, entered, done)
                changed |= begun
                if compute_end < 0 or compute_end > now:
                    if not begun:
                        break
                    continue
                if self.with_spans:
                    self.log.append(Span("device", self._name_of(tasks[done % self.count]), began, now))
                compute_end, done = -1.0, done + 1
                if done % self.count == 0:
                    ends.append(now)
                    if done == total:
                        return ends
            if changed or ended:
                self._share()
            later = [engine.left / engine.rate for engine in self.engines if engine.is_busy]
            if compute_end >= 0:
                later.append(compute_end - now)
            if not later:
                raise RuntimeError("simulate_training: expected something that runs, got tasks and copies that wait")
            step = max(0.0, min(later))
            now = compute_end if compute_end >= 0 and step == compute_end - now else now + step
            ended = False
            for engine in self.engines:
                if engine.is_busy:
                    engine.left -= engine.rate * step
                    if engine.left <= 1e-6:
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

    def _begin(self, engine: _Engine, now: float, entered: int, done: int) -> bool:
        turn, one = engine.queue[engine.position]
        if not self._may_begin(engine, turn, one, entered, done):
            return False
        if isinstance(one, Move):
            nbytes = one.nbytes + self.latency_ns * engine.alone
        else:
            nbytes = float(self.training.units[one].host_step_bytes)
        engine.left, engine.began, engine.is_busy = nbytes, now, True
        return True

    def _may_begin(self, engine: _Engine, turn: int, one: Move | int, entered: int, done: int) -> bool:
        first = turn * self.count
        if not isinstance(one, Move):
            ready = done > first + self.last_backward if self.training.clips else True
            return ready and self.feeding[one] > turn
        if one.is_out:
            return done > first + one.task
        left = one.brings_back
        if left is not None and left.completed < turn + (left.task < one.task):
            return False
        if one.follows_step:
            # The parameters of the step before: they are whole when their step on the CPU, or its copies out, are done.
            if one.unit in self.on_cpu:
                if self.cpu_done[one.unit] < turn:
                    return False
            elif self.stepped_outs[one.unit] < self.step_outs[one.unit] * (turn + self.steps_first[one.unit]):
                return False
        return entered > first + one.bound

    def _end(self, engine: _Engine, now: float) -> None:
        turn, one = engine.queue[engine.position]
        engine.position += 1
        engine.is_busy = False
        if not isinstance(one, Move):
            self.cpu_done[one] += 1
            name = f"step of {self.training.units[one].name}"
        else:
            name = f"{one.byte_class.value} of {self.training.units[one.unit].name}"
            index = turn * self.count + (one.bound if one.is_out else one.task)
            if one.is_out:
                self.pending_outs[min(index, len(self.pending_outs) - 1)] -= 1
                one.completed += 1
                self.feeding[one.unit] += one.feeds_step
                self.stepped_outs[one.unit] += one.byte_class is ByteClass.PARAMETER
            else:
                self.pending_ins[index] -= 1
        if self.with_spans:
            self.log.append(Span(engine.row, name, engine.began, now))

    def _share(self) -> None:
        """Sets the rates of what runs now."""
        copies = [engine for engine in (self.to_device, self.to_host) if engine.is_busy]
        for engine in self.engines:
            engine.rate = engine.alone if engine.is_busy else 0.0
        both = sum(engine.rate for engine in copies)
        if len(copies) == 2 and both > self.duplex:
            for engine in copies:
                engine.rate *= self.duplex / both
        traffic = sum(engine.rate for engine in self.engines)
        if traffic > self.host_rate:
            for engine in self.engines:
                engine.rate *= self.host_rate / traffic
