"""Estimates of the memory and the least time of a placement, for the search to rank thousands a second.

They know less than the bound's program, but add up what each unit changes. A row of memory has the bytes that one place
of the cycle needs, or that the host holds. A row of time has a lower limit for the time of some consecutive windows of
the cycle: the time in which the link makes the copies that are due in them and the copies to the host that begin in
them. Bytes that have room at the task before the windows, or behind them, need not be copied in them. The other windows
last at least as long as they compute.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from vdnn.planning.training.cycle import TaskKind
from vdnn.planning.training.placement import Activations, UnitPlacement
from vdnn.planning.training.training import TrainingMachine
from vdnn.planning.training.unit_effects import GB, UnitEffects

_USED = 0.5  # of the room for copies outside of a row's windows, that no plan can use in the mean
_WINDOWS = 12


@dataclass(frozen=True, slots=True)
class Estimate:
    """`columns[unit]` are the columns of its placements. Rows of memory are in 1e9 bytes over what there is, of time in
    seconds. The least time of a step is certain; the likely one ranks placements."""

    columns: Sequence[dict[UnitPlacement, int]]
    memory_base: Any
    memory: Any
    time_base: Any
    likely_base: Any
    time: Any

    @staticmethod
    def of_effects(effects: UnitEffects, machine: TrainingMachine, budget_bytes: int) -> Estimate:
        """Needs NumPy, as the effects do."""
        import numpy

        changes, base = effects.changes, effects.base
        memory_base: Any = numpy.append(base.needed - budget_bytes / GB, base.host - machine.host_bytes / GB)
        memory = numpy.concatenate([changes.needed, changes.host[:, None]], axis=1)
        rows = _TimeRows(effects, machine, budget_bytes)
        rows.add_all()
        likely = [seconds + _USED * room_s for seconds, room_s in zip(rows.base, rows.room_s, strict=True)]
        time = numpy.array(rows.changes).T
        return Estimate(effects.columns, memory_base, memory, numpy.array(rows.base), numpy.array(likely), time)

    def of(self, units: Sequence[UnitPlacement]) -> tuple[float, float]:
        """Bytes over the budget and the host's memory, in 1e9, and the least time of a step in seconds."""
        memory, seconds = self.changes(enumerate(units))
        return max(0.0, float((self.memory_base + memory).max())), float((self.time_base + seconds).max())

    def rank(self, memory: Any, seconds: Any) -> tuple[float, float, float]:
        """Bytes over what there is, the likely and the least time, for the changes of all units together."""
        over = max(0.0, float((self.memory_base + memory).max()))
        return over, float((self.likely_base + seconds).max()), float((self.time_base + seconds).max())

    def changes(self, units: Iterable[tuple[int, UnitPlacement]]) -> tuple[Any, Any]:
        """The numbers that placements of some units, with their places, add to the rows of memory and of time."""
        chosen = []
        for index, one in units:
            columns = self.columns[index]
            chosen += [columns[part] for part in _parts(one) if part in columns]
        return self.memory[chosen].sum(axis=0), self.time[chosen].sum(axis=0)

    def of_products(
        self, homes: Sequence[Sequence[UnitPlacement]], fates: Sequence[Sequence[Activations]]
    ) -> Iterator[tuple[tuple[float, float, float], int, int]]:
        """The ranks of all pairs, with the places of both."""
        activations = [[UnitPlacement(fate) for fate in one] for one in fates]
        changes = [[self.changes(enumerate(one)) for one in ones] for ones in (homes, activations)]
        for place, (memory, seconds) in enumerate(changes[0]):
            for other, (more_memory, more_seconds) in enumerate(changes[1]):
                yield self.rank(memory + more_memory, seconds + more_seconds), place, other


def _parts(one: UnitPlacement) -> tuple[UnitPlacement, UnitPlacement]:
    known = _PARTS.get(one)
    if known is None:
        moved = UnitPlacement(Activations.KEEP, one.streams, one.gradient_leaves, one.state)
        known = _PARTS[one] = (moved, UnitPlacement(one.activations))
    return known


_PARTS: dict[UnitPlacement, tuple[UnitPlacement, UnitPlacement]] = {}


class _TimeRows:
    """The rows of time as they are added: the value of the base, what each column adds to it, and the seconds by which
    it is shorter because of copies outside of its windows."""

    def __init__(self, effects: UnitEffects, machine: TrainingMachine, budget_bytes: int) -> None:
        self.base: list[float] = []
        self.changes: list[Any] = []
        self.room_s: list[float] = []
        self._effects, self._machine, self._budget = effects, machine, budget_bytes / GB
        self._cuts = _cuts(effects)
        self._places = len(effects.places)

    def add_all(self) -> None:
        link, host_rate = self._machine.link, self._machine.host_bytes_per_s / GB
        into_rate, out_rate = link.to_device_bytes_per_s / GB, link.to_host_bytes_per_s / GB
        both_rate = min(link.duplex_bytes_per_s / GB, host_rate)
        cpu_rate = min(self._machine.cpu_bytes_per_s / GB, host_rate)
        everywhere = list(range(self._places))
        copies = self._sum("ins", everywhere), self._sum("outs", everywhere)
        cpu = self._sum("cpu", everywhere)
        self._add([], self._sum("ins", []), 1.0)
        self._add(everywhere, copies[0], into_rate)
        self._add(everywhere, copies[1], out_rate)
        self._add(everywhere, _added(*copies), both_rate)
        self._add(everywhere, _added(*copies, cpu), host_rate)
        self._add(everywhere, cpu, cpu_rate)
        for first, last in self._spans():
            window = self._between(first, last)
            ins, outs = self._late_ins(first, last), self._early_outs(first, last)
            self._add(window, ins, into_rate, self._budget)
            self._add(window, outs, out_rate, self._budget)
            self._add(window, _added(ins, outs), both_rate, 2 * self._budget)
        if not self._effects.training.clips:
            return
        # With clipping, the cores begin when backward has ended, and end before the forward that needs them.
        backward = [at for at, place in enumerate(self._effects.places) if place[0] is TaskKind.BACKWARD]
        first = (backward[-1] + 1) % self._places
        for last in (cut for cut in self._cuts if 0 < cut <= backward[0]):
            left = self._sum("cpu_waits", [last])
            done = cpu[0] - left[0], cpu[1] - left[1]
            window = self._between(first, last)
            self._add(window, done, cpu_rate)
            traffic = _added(self._late_ins(first, last), self._early_outs(first, last), done)
            self._add(window, traffic, host_rate, 2 * self._budget)

    def _spans(self) -> Iterator[tuple[int, int]]:
        """The first place of each span of windows, and the one behind it: also around the end of the cycle."""
        count = len(self._cuts)
        for first in range(count):
            for length in range(1, count):
                yield self._cuts[first], self._cuts[(first + length) % count]

    def _between(self, first: int, last: int) -> list[int]:
        return [*range(first, last)] if last > first else [*range(first, self._places), *range(last)]

    def _late_ins(self, first: int, last: int) -> tuple[float, Any]:
        """Copies that are due in these windows, less those that have room as they begin: but for the budget."""
        due = [(place + 1) % self._places for place in self._between(first, last)]
        return _added(self._sum("ins", due), self._held_at(first))

    def _early_outs(self, first: int, last: int) -> tuple[float, Any]:
        return _added(self._sum("outs", self._between(first, last)), self._held_at(last))

    def _held_at(self, place: int) -> tuple[float, Any]:
        needed, in_place = self._sum("needed", [place]), self._sum("written_in_place", [place])
        return needed[0] - in_place[0], needed[1] - in_place[1]

    def _sum(self, name: str, places: list[int]) -> tuple[float, Any]:
        base, changes = getattr(self._effects.base, name), getattr(self._effects.changes, name)
        return float(base[places].sum()), changes[:, places].sum(axis=1)

    def _add(self, window: list[int], value: tuple[float, Any], rate: float, spare: float = 0.0) -> None:
        """The window takes at least so long as its value, less `spare`, at this rate."""
        others = sorted(set(range(self._places)).difference(window))
        computing = self._sum("computing", others)
        self.base.append((value[0] - spare) / rate + computing[0])
        self.changes.append(value[1] / rate + computing[1])
        self.room_s.append(spare / rate)


def _added(*values: tuple[float, Any]) -> tuple[float, Any]:
    return sum(base for base, _ in values), sum(changes for _, changes in values)


def _cuts(effects: UnitEffects) -> list[int]:
    """The places at which windows begin: where phases change, and in between in parts of about equal time."""
    kinds, durations = [kind for kind, _, _ in effects.places], effects.base.computing
    cuts, since, total = [0], 0.0, float(durations.sum()) or 1.0
    for place in range(1, len(kinds)):
        since += float(durations[place - 1])
        is_turn = kinds[place] is not kinds[place - 1] and TaskKind.BACKWARD in kinds[place - 1 : place + 1]
        if is_turn or since * _WINDOWS >= total:
            cuts.append(place)
            since = 0.0
    return cuts
