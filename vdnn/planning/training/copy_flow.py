"""The linear program of a certified lower bound on the step of a whole training.

[Note: The relaxation] For each unit, the program takes parts of the placements of its parameters, gradient and state,
and parts of the fates of its activations; see unit_effects.py. The cycle is cut into windows, which begin with a task.
At the beginning of a window some bytes have been copied to the device ahead of their need, and some that are to leave
are still there. Both are in the room that the task leaves under the budget, but for parameters that are written in
place. A window lasts as long as its tasks, and as long as the link, the host's memory and the cores need for what is
copied and stepped in it: what is due in it or leaves in it, less what was copied ahead or stays, and what it copies
ahead for later windows or still finds from earlier ones. Nothing is copied ahead before its memory or its bytes are
there, and no step on the CPU begins before its gradient is there, or ends after its parameters' need.

[Note: Left out] Latencies, whole units instead of parts, the order of copies within a window, and that a copy waits for
one of the other direction. This makes the bound lower, never wrong.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

from vdnn.errors import LibraryMissingError, VdnnError
from vdnn.planning.bound.linear_program import LinearProgram
from vdnn.planning.training.training import TrainingMachine
from vdnn.planning.training.unit_effects import GB, UnitEffects

_MOST_WINDOWS = 192


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
        program, link = self._program, self._machine.link
        count = len(self._effects.places)
        windows = _windows(count)
        steps_on_cpu = bool(self._effects.changes.cpu.any())

        def new_columns(is_there: bool = True) -> list[int]:
            return list(program.new_columns(len(windows), is_bounded=False)) if is_there else []

        lasts, ahead, behind, into, out = (new_columns() for _ in range(5))
        cpu, cpu_waits = new_columns(steps_on_cpu), new_columns(steps_on_cpu)
        host_rate = self._machine.host_bytes_per_s / GB
        into_rate, out_rate = link.to_device_bytes_per_s / GB, link.to_host_bytes_per_s / GB
        both_rate = min(link.duplex_bytes_per_s / GB, host_rate)
        cpu_rate = min(self._machine.cpu_bytes_per_s / GB, host_rate)
        for now, window in enumerate(windows):
            following = (now + 1) % len(windows)
            first, behind_last = window[0], (window[-1] + 1) % count
            base, terms = self._sum("needed", first, -1.0)
            in_place, without_room = self._sum("written_in_place", first, 1.0)
            room = [*terms, *without_room, (ahead[now], -1.0), (behind[now], -1.0)]
            program.require(room, base - in_place - self._budget)
            base, terms = self._sum("ahead", first, 1.0)
            program.require([*terms, (ahead[now], -1.0)], -base)
            base, terms = self._sum("computing", window, -1.0)
            program.require([*terms, (lasts[now], 1.0)], base)
            base, terms = self._sum("ins", [*window[1:], behind_last], -1.0)
            program.require([*terms, (into[now], 1.0), (ahead[now], 1.0), (ahead[following], -1.0)], base)
            base, terms = self._sum("outs", window, -1.0)
            program.require([*terms, (out[now], 1.0), (behind[now], -1.0), (behind[following], 1.0)], base)
            program.require([(lasts[now], into_rate), (into[now], -1.0)], 0.0)
            program.require([(lasts[now], out_rate), (out[now], -1.0)], 0.0)
            program.require([(lasts[now], both_rate), (into[now], -1.0), (out[now], -1.0)], 0.0)
            if steps_on_cpu:
                base, terms = self._sum("cpu", window, -1.0)
                program.require([*terms, (cpu[now], 1.0), (cpu_waits[now], -1.0), (cpu_waits[following], 1.0)], base)
                base, terms = self._sum("cpu_waits", first, 1.0)
                program.require([*terms, (cpu_waits[now], -1.0)], -base)
                program.require([(lasts[now], cpu_rate), (cpu[now], -1.0)], 0.0)
                shared = [(into[now], -1.0), (out[now], -1.0), (cpu[now], -1.0)]
                program.require([(lasts[now], host_rate), *shared], 0.0)
        period = program.new_columns(1, is_bounded=False)[0]
        program.require([(period, 1.0), *((one, -1.0) for one in lasts)], 0.0)
        return period


def _windows(count: int) -> list[list[int]]:
    """Cuts the places into windows, of one place if there are few."""
    many = min(count, _MOST_WINDOWS)
    cuts = [count * index // many for index in range(many + 1)]
    return [list(range(first, last)) for first, last in itertools.pairwise(cuts)]
