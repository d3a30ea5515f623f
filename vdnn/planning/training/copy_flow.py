"""The linear program of a certified lower bound on the step of a whole training.

[Note: The relaxation] For each unit, the program takes parts of the placements of its parameters, gradient and state,
and parts of the fates of its activations; see unit_effects.py. The cycle is cut into windows, which begin with a task.
At the beginning of a window some bytes have been copied to the device ahead of their need, and some that are to leave
are still there. Both are in the room that the task leaves under the budget, but for parameters that are written in
place. A window lasts at least as long as its tasks, and as the link, the host's memory and the cores need for the
copies and steps in it. These are the copies that are due in it or leave in it, less those that were made ahead or are
put off, and the copies that it makes for later windows or has left from earlier ones. Nothing is copied ahead before
its memory or its bytes are there, and no step on the CPU begins before its gradient is there, or ends after its
parameters' need.

In small trainings a unit has a placement as a whole, as far as the first node of the solver's tree knows. In larger
ones that takes long and changes little.

[Note: Left out] Latencies, the order of copies within a window, and that a copy waits for one of the other direction.
This makes the bound lower, never wrong.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

from vdnn.errors import LibraryMissingError, VdnnError
from vdnn.planning.bound.linear_program import LinearProgram
from vdnn.planning.training.training import TrainingMachine
from vdnn.planning.training.unit_effects import GB, UnitEffects

_MOST_WINDOWS = 128
_MOST_WHOLE = 100  # columns
_NODES = 1  # of the solver's tree


class CopyFlow:
    """`least_s` is the least time of a step, infinite if no placement fits, and `parts` has the part of each column."""

    def __init__(self, effects: UnitEffects, machine: TrainingMachine, budget_bytes: int) -> None:
        self._effects, self._machine, self._budget = effects, machine, budget_bytes / GB
        self._program = LinearProgram()
        self._program.new_columns(effects.count)
        for group in effects.groups:
            if group:
                self._program.require([(column, -1.0) for column in group], -1.0)
        self._require_memory()
        period = self._require_times()
        self.least_s, self.parts = math.inf, [0.0] * effects.count
        try:
            self.least_s = self._program.least_of(period) or 0.0
        except LibraryMissingError:
            raise
        except VdnnError:  # no solution
            return
        self.parts = self._program.values[: effects.count]
        if effects.count <= _MOST_WHOLE:
            whole_s = self._program.least_of(period, range(effects.count), _NODES) or 0.0
            self.least_s = max(self.least_s, whole_s if math.isfinite(whole_s) else 0.0)

    def _sum(self, name: str, places: Any, sign: float) -> tuple[float, list[tuple[int, float]]]:
        """The number of the base, and what each column adds to it, times `sign`. A list of places counts together."""
        values, base = getattr(self._effects.changes, name)[:, places], getattr(self._effects.base, name)[places]
        if not isinstance(places, int):
            values, base = values.sum(axis=1), base.sum()
        (changed,) = values.nonzero()
        return float(base), list(zip(changed.tolist(), (sign * values[changed]).tolist(), strict=True))

    def _require_memory(self) -> None:
        seen = set()
        for place in range(len(self._effects.places)):
            base, terms = self._sum("needed", place, -1.0)
            row = (base, tuple(terms))
            if row not in seen:  # micro-batches are alike
                seen.add(row)
                self._program.require(terms, base - self._budget)
        host = self._effects.changes.host
        self._program.require(
            [(column, -float(host[column])) for column in host.nonzero()[0].tolist()],
            float(self._effects.base.host) - self._machine.host_bytes / GB,
        )

    def _require_times(self) -> int:
        """Returns the column of the step's time. See [Note: The relaxation]."""
        program = self._program
        windows = _windows(len(self._effects.places))
        columns = [_Window(program) for _ in windows]
        steps_on_cpu = bool(self._effects.changes.cpu.any())
        for now, places in enumerate(windows):
            one, following = columns[now], columns[(now + 1) % len(windows)]
            is_one_task = len(places) == 1 and self._effects.is_one_task[places[0]]
            self._require_copies(places, one, following)
            self._require_room(places[0], one, following if is_one_task else None)
            self._require_rates(one)
            base, terms = self._sum("computing", places, -1.0)
            program.require([*terms, (one.runs, 1.0)], base)
            if is_one_task:  # copies that it puts off are made behind it
                rate = self._machine.link.to_host_bytes_per_s / GB
                outs, more = self._sum("outs", places, -1.0 / rate)
                terms += more
                program.require([*terms, (one.runs, 1.0), (following.behind, 1.0 / rate)], base + outs / rate)
            if steps_on_cpu:
                self._require_cpu(places, one, following)
        period = program.new_columns(1, is_bounded=False)[0]
        times = [column for one in columns for column in (one.waits, one.runs)]
        program.require([(period, 1.0), *((column, -1.0) for column in times)], 0.0)
        return period

    def _require_copies(self, places: list[int], one: _Window, following: _Window) -> None:
        """The copies while the first task waits, and while the tasks run."""
        program = self._program
        base, terms = self._sum("ins", places[0], -1.0)
        program.require([*terms, (one.into_waiting, 1.0), (one.ahead_before, 1.0), (one.ahead, -1.0)], base)
        base, terms = self._sum("ins", places[1:], -1.0)
        program.require([*terms, (one.into, 1.0), (one.ahead, 1.0), (following.ahead_before, -1.0)], base)
        program.require([(one.out_waiting, 1.0), (one.behind, -1.0), (one.still_behind, 1.0)], 0.0)
        base, terms = self._sum("outs", places, -1.0)
        program.require([*terms, (one.out, 1.0), (one.still_behind, -1.0), (following.behind, 1.0)], base)

    def _require_room(self, first: int, one: _Window, following: _Window | None) -> None:
        """A copy to the device has its memory while a task runs in which it begins, so what is ahead at the `following`
        window is limited, too, if this one is one task."""
        needed, terms = self._sum("needed", first, -1.0)
        in_place, without_room = self._sum("written_in_place", first, 1.0)
        there, most = self._sum("ahead", first, 1.0)
        for ahead in (one.ahead, *(() if following is None else (following.ahead_before,))):
            room = [*terms, *without_room, (ahead, -1.0), (one.behind, -1.0)]
            self._program.require(room, needed - in_place - self._budget)
            self._program.require([*most, (ahead, -1.0)], -there)

    def _require_rates(self, one: _Window) -> None:
        """Time is spent on copies to the device, to the host, or both at once, when each has its share."""
        (into_alone, _, _), (_, out_alone, _) = self._rates(True, False, False), self._rates(False, True, False)
        into_shared, out_shared, _ = self._rates(True, True, False)
        for time, into, out in ((one.waits, one.into_waiting, one.out_waiting), (one.runs, one.into, one.out)):
            lost = (into_alone - into_shared) / out_shared
            self._program.require([(time, into_alone), (into, -1.0), (out, -lost)], 0.0)
            lost = (out_alone - out_shared) / into_shared
            self._program.require([(time, out_alone), (out, -1.0), (into, -lost)], 0.0)

    def _require_cpu(self, places: list[int], one: _Window, following: _Window) -> None:
        """The cores share the host's memory with the copies: a window is divided by what of the three runs at once."""
        program = self._program
        base, terms = self._sum("cpu", places, -1.0)
        program.require([*terms, (one.cpu, 1.0), (one.cpu_waits, -1.0), (following.cpu_waits, 1.0)], base)
        base, terms = self._sum("cpu_waits", places[0], 1.0)
        program.require([*terms, (one.cpu_waits, -1.0)], -base)
        together = [which for which in itertools.product((False, True), repeat=3) if any(which)]
        times = program.new_columns(len(together), is_bounded=False)
        program.require([(one.waits, 1.0), (one.runs, 1.0), *((time, -1.0) for time in times)], 0.0)
        rates = [self._rates(*which) for which in together]
        for engine, done in enumerate(((one.into_waiting, one.into), (one.out_waiting, one.out), (one.cpu,))):
            moved = [(time, rate[engine]) for time, rate in zip(times, rates, strict=True) if rate[engine]]
            program.require([*moved, *((column, -1.0) for column in done)], 0.0)

    def _rates(self, into: bool, out: bool, cpu: bool) -> tuple[float, float, float]:
        """The rates of those that run at once, as in csrc/planning/training_cycle.h."""
        link, machine = self._machine.link, self._machine
        rates = [
            link.to_device_bytes_per_s / GB if into else 0.0,
            link.to_host_bytes_per_s / GB if out else 0.0,
            machine.cpu_bytes_per_s / GB if cpu else 0.0,
        ]
        on_link = min(1.0, link.duplex_bytes_per_s / GB / (rates[0] + rates[1])) if into and out else 1.0
        rates[:2] = rates[0] * on_link, rates[1] * on_link
        rates[2] = min(rates[2], machine.host_bytes_per_s / GB)
        in_memory = min(1.0, machine.host_bytes_per_s / GB / sum(rates))
        return rates[0] * in_memory, rates[1] * in_memory, rates[2] * in_memory


class _Window:
    """The columns of a window. It begins when its first task has its memory, and may wait for its copies: then the
    task runs. Bytes that are `ahead` are due later, those `behind` are to leave; both at the beginning and when the
    task runs."""

    def __init__(self, program: LinearProgram) -> None:
        columns = iter(program.new_columns(12, is_bounded=False))
        self.waits, self.runs = next(columns), next(columns)
        self.ahead_before, self.ahead = next(columns), next(columns)
        self.behind, self.still_behind = next(columns), next(columns)
        self.into_waiting, self.into = next(columns), next(columns)
        self.out_waiting, self.out = next(columns), next(columns)
        self.cpu, self.cpu_waits = next(columns), next(columns)


def _windows(count: int) -> list[list[int]]:
    """Cuts the places into windows, of one place if there are few."""
    many = min(count, _MOST_WINDOWS)
    cuts = [count * index // many for index in range(many + 1)]
    return [list(range(first, last)) for first, last in itertools.pairwise(cuts)]
