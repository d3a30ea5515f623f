"""The programs of the bound: the least time that a step under a budget has to wait.

[Note: The relaxation] A plan is considered at the anchors only: intervals that are over the budget with everything
kept. At an anchor, enough bytes are absent. An absent storage was copied to the host after its copy point, and has to
be reloaded before its use. Each engine does one copy at a time. So from a copy point to the anchor, the step takes at
least as long as the copies to the host that began after that point; from the anchor to a use, at least as long as the
reloads that end before that use. A recomputed storage is absent until its first use without any copies, and its compute
time is added to the step. Its inputs are on the device at that time: a recomputed input is no longer absent, and an
offloaded one has been reloaded. The shortest step that satisfies all this is a linear program.

[Note: The second program] A program in which all is whole has two numbers for each gap and anchor: released by then,
and reloaded by then. Both can only grow.

[Note: Whole recomputes] The third program has the rows of the first, and integers for the choice of recomputes only.

[Note: Whole storages] At an anchor there is limited room for the storages that may be absent. Storages larger than the
room are absent, at most one storage larger than half of the room is present, and so on. These rows cut off solutions
with parts of storages, without integers.

[Note: Left out] The relaxation ignores that the engines share a link, that a copy cannot be interrupted, that the bytes
of a codec take memory, and everything between anchors. This makes the bound lower, never wrong. It includes two facts
about the memory during a recompute: whether there is room for the recompute at all, and that a chain of recomputes
stays on the device (the second half of this file).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from vdnn.planning.bound.linear_program import LinearProgram, Terms
from vdnn.planning.bound.recompute_moments import RecomputeMoments
from vdnn.planning.costs import LinkCosts
from vdnn.planning.footprint import absent_intervals
from vdnn.planning.gaps import Gap
from vdnn.planning.recomputing import candidates_of
from vdnn.step.plan import Absence
from vdnn.step.recording import Recording

_MOST_PRESENT = 4  # of the storages that are large beside the room of an anchor
_MOST_SUMS = 1 << 16
_LARGEST = 100.0  # the unit of the program: the largest storage and its copy have this size
_TOLERANCE = 1e-6  # the solver's error


@dataclass(frozen=True, slots=True)
class _Columns:
    """The columns of one gap, by anchor: released by then, and reloaded by then. `ever` is `released` at the last
    anchor. In the first program `released` says whether the gap is absent, and `reloaded` is empty."""

    released: dict[int, int]
    reloaded: dict[int, int]
    ever: int


class StallProgram:
    """The first program, or with `is_whole` the second. Its variables are: the stall up to each point, that is how much
    longer than its computing the step has taken; the columns of each gap; which storages are recomputed; and running
    sums of copies, which keep the program sparse."""

    def __init__(
        self,
        recording: Recording,
        gaps: Sequence[Gap],
        costs: LinkCosts,
        budget_bytes: int,
        anchors: int,
        *,
        is_whole: bool,
    ) -> None:
        self._recording = recording
        self._is_whole = is_whole
        # A storage with several gaps has one copy to the host, which only one gap at a time may count.
        self._with_several_gaps = {gap.lifetime for gap in gaps if gap.number > 0}
        self._costs = costs
        self._unit_per_byte = _LARGEST / max(gap.nbytes for gap in gaps)
        slowest = min(costs.to_host_bytes_per_s, costs.to_device_bytes_per_s)
        self._unit_per_ns = self._unit_per_byte * slowest / 1e9
        self._reached_ns = list(itertools.accumulate(point.compute_ns for point in recording.points))
        self._missing = [point.peak_bytes - budget_bytes for point in recording.points]
        self._program = LinearProgram()
        self._program.new_columns(len(recording.points), is_bounded=False)
        for before, point in itertools.pairwise(range(len(recording.points))):
            self._program.require([(point, 1.0), (before, -1.0)], 0.0)
        chosen = choose_anchors(self._missing, gaps, anchors)
        self._moments = RecomputeMoments(recording, gaps, budget_bytes)
        self._recomputed = self._add_recomputes()
        self._recomputed_by = RecomputedBy(self._program, self._moments, self._recomputed)
        self._columns_of = {gap: columns for gap in gaps if (columns := self._add_gap(gap, chosen)) is not None}
        for anchor in chosen:
            self._add_anchor(anchor)

    def _add_gap(self, gap: Gap, anchors: Sequence[int]) -> _Columns | None:
        inside = [anchor for anchor in anchors if gap.first <= anchor <= gap.last]
        if not inside:
            return None
        released = dict(zip(inside, self._program.new_columns(len(inside)), strict=True))
        if not self._is_whole:
            return _Columns(released, {}, released[inside[-1]])
        reloaded = {} if gap.use is None else dict(zip(inside, self._program.new_columns(len(inside)), strict=True))
        for columns in (released, reloaded):
            for earlier, later in itertools.pairwise(columns.values()):
                self._program.require([(later, 1.0), (earlier, -1.0)], 0.0)
        for anchor, column in reloaded.items():
            self._program.require([(released[anchor], 1.0), (column, -1.0)], 0.0)
        return _Columns(released, reloaded, released[inside[-1]])

    def _absent_until_recomputed(self, lifetime: int) -> range:
        """The most intervals in which it is absent: it may be recomputed earlier, for another recompute."""
        known_point = self._moments.recompute_of(lifetime).known_point
        return absent_intervals(self._recording.lifetimes[lifetime], Absence(known_point))

    def _add_recomputes(self) -> dict[int, int]:
        """A column for each candidate. Its compute time lies after the first use of the step and before its own."""
        lifetimes = self._recording.lifetimes
        candidates = candidates_of(self._recording)
        columns = dict(zip(candidates, self._program.new_columns(len(candidates)), strict=True))
        used = sorted((lifetimes[one].uses[0], one) for one in candidates if lifetimes[one].uses)
        if not used:
            return columns
        first_use = min(lifetime.uses[0] for lifetime in lifetimes if lifetime.uses)
        before = [(first_use - 1, 1.0)] if first_use > 0 else []
        total: int | None = None
        for use, lifetime in used:
            terms = [(columns[lifetime], -self._moments.recompute_of(lifetime).compute_ns * self._unit_per_ns)]
            if total is not None:
                terms.append((total, -1.0))
            (total,) = self._program.new_columns(1, is_bounded=False)
            self._program.require([(total, 1.0), *terms], 0.0)
            self._program.require([(use, 1.0), (total, -1.0), *((column, -factor) for column, factor in before)], 0.0)
        return columns

    def _add_anchor(self, anchor: int) -> None:
        absent: dict[int, list[tuple[int, float]]] = {}  # by lifetime, the columns that say that it is absent
        offloads: list[tuple[int, tuple[int, float]]] = []  # copy point, and the copy
        reloads: list[tuple[int, list[tuple[int, float]]]] = []
        for gap, columns in self._columns_of.items():
            offload_time = self._copy_time(gap, self._costs.to_host_bytes_per_s)
            reload_time = self._copy_time(gap, self._costs.to_device_bytes_per_s)
            copy_point = self._recording.lifetimes[gap.lifetime].copy_point
            if anchor in columns.released:
                released = columns.released[anchor]
                if gap.lifetime in self._recomputed:  # a recomputed storage is not offloaded
                    self._program.require([(released, -1.0), (self._recomputed[gap.lifetime], -1.0)], -1.0)
                absent[gap.lifetime] = [(released, 1.0)]
                offloads.append((copy_point, (released, offload_time)))
                if anchor in columns.reloaded:
                    absent[gap.lifetime].append((columns.reloaded[anchor], -1.0))
                    terms = [(columns.ever, reload_time), (columns.reloaded[anchor], -reload_time)]
                    reloads.append((gap.last, terms))
                elif not self._is_whole:  # the second program has no reload column for a gap without a use
                    due = self._due_for_recomputes(gap, anchor, released)
                    if gap.use is not None:
                        due.append((gap.last, released))
                    before: list[tuple[int, float]] = []
                    for point, column in due:
                        reloads.append((point, [(column, reload_time), *before]))
                        before = [(column, -reload_time)]
            elif self._is_whole and gap.last < anchor and gap.lifetime not in self._with_several_gaps:
                offloads.append((copy_point, (columns.ever, offload_time)))
            elif self._is_whole and gap.first > anchor and gap.use is not None:
                reloads.append((gap.last, [(columns.ever, reload_time)]))
        for lifetime, column in self._recomputed.items():
            if anchor in self._absent_until_recomputed(lifetime):
                absent.setdefault(lifetime, []).append((self._absent_still(lifetime, column, anchor), 1.0))
        self._require_absent(anchor, absent)
        for point, busy in self._running_sums([(point, [copy]) for point, copy in sorted(offloads, reverse=True)]):
            # From the copy point to the start of the interval, after the hook at the point before it.
            self._require_time(busy, point, anchor - 1)
        for use, busy in self._running_sums(sorted(reloads, key=lambda one: one[0])):
            self._require_time(busy, anchor, use, self._recompute_time_at(use))

    def _absent_still(self, lifetime: int, recomputed: int, anchor: int) -> int:
        """A column: discarded, and at an anchor before its first use not yet recomputed for another storage."""
        by_then = self._recomputed_by.by(lifetime, anchor - 1)
        if not by_then:
            return recomputed
        (absent,) = self._program.new_columns(1)
        self._program.require(
            [(recomputed, 1.0), (absent, -1.0), *((column, -factor) for column, factor in by_then)], 0.0
        )
        return absent

    def _due_for_recomputes(self, gap: Gap, anchor: int, released: int) -> list[tuple[int, int]]:
        """Points within the gap, in order, with columns: 1 if the storage is absent at the anchor and has been reloaded
        by then, because another one is recomputed from it after the anchor."""
        readers = self._moments.made_from.get(gap.lifetime, ())
        events = {point for one in readers for point in self._recomputed_by.events(one) if anchor <= point < gap.last}
        found: list[tuple[int, int]] = []
        for point in sorted({min(events), max(events)} if events else ()):
            (due,) = self._program.new_columns(1)
            for reader in readers:
                by_then = self._recomputed_by.by(reader, point)
                if by_then:
                    earlier = self._recomputed_by.by(reader, anchor - 1)
                    terms = [(due, 1.0), (released, -1.0), *((column, -factor) for column, factor in by_then), *earlier]
                    self._program.require(terms, -1.0)
            if found:
                self._program.require([(due, 1.0), (found[-1][1], -1.0)], 0.0)
            self._program.require([(released, 1.0), (due, -1.0)], 0.0)
            found.append((point, due))
        return found

    def _require_absent(self, anchor: int, absent: dict[int, list[tuple[int, float]]]) -> None:
        """Enough bytes are absent. See [Note: Whole storages]."""
        nbytes = {lifetime: self._recording.lifetimes[lifetime].nbytes for lifetime in absent}
        missing = _sum_of_whole(list(nbytes.values()), self._missing[anchor])
        terms = [
            (one, nbytes[key] * self._unit_per_byte * factor) for key, ones in absent.items() for one, factor in ones
        ]
        self._program.require(terms, missing * self._unit_per_byte)
        room = sum(nbytes.values()) - missing
        for present in range(_MOST_PRESENT):
            large = [lifetime for lifetime in absent if nbytes[lifetime] * (present + 1) > room]
            if len(large) > present:
                self._program.require([term for lifetime in large for term in absent[lifetime]], len(large) - present)

    def _running_sums(self, copies: Sequence[tuple[int, list[tuple[int, float]]]]) -> Iterator[tuple[int, int]]:
        """For each point of `copies`, which are in order, a column with the time of all copies up to that point."""
        total: int | None = None
        for index, (point, copy) in enumerate(copies):
            terms = [(column, -factor) for column, factor in copy]
            if total is not None:
                terms.append((total, -1.0))
            (total,) = self._program.new_columns(1, is_bounded=False)
            self._program.require([(total, 1.0), *terms], 0.0)
            if index + 1 == len(copies) or copies[index + 1][0] != point:
                yield point, total

    def _copy_time(self, gap: Gap, bytes_per_s: float) -> float:
        return (gap.nbytes / bytes_per_s * 1e9 + self._costs.latency_ns) * self._unit_per_ns

    def _recompute_time_at(self, use: int) -> Terms:
        """The time in which the storage of this use is recomputed while no copy that this use needs is still running:
        negative terms, none if this is not the first use of a candidate."""
        lifetime = self._recording.points[use].lifetime
        if lifetime is None or lifetime not in self._recomputed or self._moments.first_use(lifetime) != use:
            return ()
        time = self._moments.recompute_of(lifetime).compute_ns * self._unit_per_ns
        before = [(column, time * factor) for column, factor in self._recomputed_by.by(lifetime, use - 1)]
        return [(self._recomputed[lifetime], -time), *before]

    def _require_time(self, busy: int, begin: int, end: int, less: Terms = ()) -> None:
        """The step takes at least as long as the copies, from reaching point `begin` to leaving point `end`, without
        the time of `less`, which are negative terms."""
        computed = (self._reached_ns[end] - self._reached_ns[begin]) * self._unit_per_ns
        stalls = [(end, 1.0), *([(begin - 1, -1.0)] if begin > 0 else [])]
        self._program.require([(busy, -1.0), *stalls, *less], -computed)

    def solve(self, nodes: int) -> int:
        """The least stall of the step in ns, rounded down. The second program stops after `nodes` nodes."""
        return self._least_stall_ns(self._program.bounded_columns() if self._is_whole else (), nodes)

    def solve_with_whole_recomputes(self) -> int:
        """The least stall if each candidate is recomputed or not. See [Note: Whole recomputes]."""
        return self._least_stall_ns(self._recomputed.values(), nodes=1)

    def chosen_recomputes(self) -> frozenset[int]:
        """The recomputes of the best solution that the solver knows. Empty if it knows none."""
        values = self._program.values
        return frozenset(one for one, column in self._recomputed.items() if values and values[column] > 0.5)

    def _least_stall_ns(self, whole: Collection[int], nodes: int) -> int:
        least = self._program.least_of(len(self._recording.points) - 1, whole, nodes)
        if least is None:
            return 0  # the solver stopped before it had a bound
        return max(0, int((least * (1 - _TOLERANCE) - _TOLERANCE) / self._unit_per_ns))


def _sum_of_whole(parts: Sequence[int], missing: int) -> int:
    """The least sum of some of the parts that is at least `missing`. If there are too many sums to try, `missing`."""
    room = sum(parts) - missing
    unit = math.gcd(*parts)
    if not parts or room < 0 or room // unit > _MOST_SUMS:
        return missing
    within = (1 << (room // unit + 1)) - 1
    sums = 1  # bit i is set if parts of i units in total can be kept
    for nbytes in parts:
        sums |= (sums << (nbytes // unit)) & within
    return sum(parts) - (sums.bit_length() - 1) * unit


# Chooses the anchors: the intervals of a step that the bound considers, because a long step has too many.


def choose_anchors(missing: Sequence[int], gaps: Sequence[Gap], most: int) -> list[int]:
    """The intervals over the budget, if there are at most `most` of them. Otherwise `most` of them, evenly from the
    first to the last; the one that is over the budget most; and those with the least room with everything absent, where
    each reload waits for the use of the previous one. The last add at most half as many numbers to the program again.

    `missing`: the bytes by which every interval is over the budget with everything kept.
    """
    over = [interval for interval, nbytes in enumerate(missing) if nbytes > 0]
    if len(over) <= most:
        return over
    chosen = {over[round(number * (len(over) - 1) / (most - 1))] for number in range(most)}
    chosen.add(max(over, key=lambda interval: missing[interval]))
    changes = [0] * (len(missing) + 1), [0] * (len(missing) + 1)  # of absent bytes, and of gaps across an interval
    for gap in gaps:
        for change, amount in zip(changes, (gap.nbytes, 1), strict=True):
            change[gap.first] += amount
            change[gap.last + 1] -= amount
    absent, across = (list(itertools.accumulate(change)) for change in changes)
    left = most * len(gaps) // 2
    for interval in sorted(over, key=lambda one: absent[one] - missing[one]):
        left -= across[interval]
        if left < 0:
            break
        chosen.add(interval)
    return sorted(chosen)


# The bound's columns for recomputes: by which point of the step each candidate has been recomputed.
#
# If a storage and its input are both recomputed, the input is recomputed by then too, and it stays: so a whole chain of
# recomputes is on the device from the first use of any of them. Each candidate has a column for every moment at which
# there is room for its recompute; without such a moment, the two are not both recomputed. In steps with too many
# moments, only the first uses of a storage's readers are considered.

_MOST_MOMENTS = 5_000  # of all storages together: twice as many take the solver five times as long


class RecomputedBy:
    """`chosen`: by candidate, the column that says whether it is recomputed at all."""

    def __init__(self, program: LinearProgram, moments: RecomputeMoments, chosen: dict[int, int]) -> None:
        self._program = program
        self._moments = moments
        self.chosen = chosen
        self._is_coarse = sum(len(points) for points in moments.of.values()) > _MOST_MOMENTS
        self._columns: dict[int, list[tuple[int, int]]] = {}  # by candidate: points before its first use, with columns
        for one, column in chosen.items():
            points = self._points(one)
            self._columns[one] = list(zip(points, program.new_columns(len(points)), strict=True))
            before: Terms = ()
            for _, by_then in self._columns[one]:
                program.require([(by_then, 1.0), *((other, -factor) for other, factor in before)], 0.0)
                program.require([(column, 1.0), (by_then, -1.0)], 0.0)
                before = [(by_then, 1.0)]
        for one in chosen:
            self._add_candidate(one)

    def by(self, candidate: int, point: int) -> Terms:
        """A lower limit for "recomputed when the point is left": one column, or none for 0."""
        if self._moments.first_use(candidate) <= point:
            return [(self.chosen[candidate], 1.0)]
        return [(column, 1.0) for moment, column in self._columns[candidate] if moment <= point][-1:]

    def _points(self, candidate: int) -> list[int]:
        own, of = self._moments.first_use(candidate), self._moments.of[candidate]
        if not self._is_coarse:
            return [moment for moment in of if moment < own]
        used = {self._moments.first_use(reader) for reader in self._readers(candidate)}
        return sorted(point for point in used if of and of[0] <= point < own)

    def _readers(self, candidate: int) -> list[int]:
        return self._moments.made_from.get(candidate, [])

    def _at_most(self, candidate: int, point: int) -> Terms:
        """An upper limit for "recomputed when the point is left": one column, or none for 0."""
        if not self._is_coarse:
            return self.by(candidate, point)
        of = self._moments.of[candidate]
        return [(self.chosen[candidate], 1.0)] if of and of[0] <= point else []

    def _add_candidate(self, candidate: int) -> None:
        require, chosen, own = self._program.require, self.chosen[candidate], self._moments.first_use(candidate)
        readers, is_its_own = self._readers(candidate), own in self._moments.of[candidate]
        for point, column in self._columns[candidate]:  # before its first use, only for a reader
            require([(column, -1.0), *(term for reader in readers for term in self._at_most(reader, point))], 0.0)
        for reader in readers:
            for point in self.events(reader):
                if point < own:
                    needed = [(other, -factor) for other, factor in self.by(reader, point)]
                    require([*self.by(candidate, point), *needed, (chosen, -1.0)], -1.0)
        if is_its_own or own > self._moments.last_point:
            return
        # There is no room for its recompute at its first use: it is recomputed before that, or not at all.
        earlier = [term for reader in readers for term in self._at_most(reader, own - 1)]
        require([*(earlier if self._is_coarse else self.by(candidate, own - 1)), (chosen, -1.0)], 0.0)

    def events(self, reader: int) -> set[int]:
        """The points at which the limits of by() may change."""
        return {self._moments.first_use(reader), *(() if self._is_coarse else self._moments.of[reader])}
