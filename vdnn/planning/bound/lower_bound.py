"""How short the step can be at best under a budget: a certified lower bound, by relaxation.

No plan has a shorter step, whatever its order of copies, its release and its reload points. A plan is seen at some
intervals only, the anchors, each of which would not fit with everything kept: at an anchor enough bytes are away. What
is away there has been copied out since its copy could begin, and has to be copied back before it is used, by engines
that do one copy at a time: so between any such point and the anchor the step takes at least as long as those copies
out, and between the anchor and any use at least as long as those copies back. The shortest step for which all this
holds is a linear program. What is rebuilt instead is away until it is used, its copies are not made, and the step is
longer by its computing. What it is made from has to be there then: rebuilt itself it is no longer away, and moved it
has been copied back.

Where that leaves something open and the step is small, a second program says more. For each gap and anchor in it there
are two numbers, whether it was given up by then and whether it was asked back by then, neither of which is taken back;
and they are whole.

What is left out makes the bound lower, never wrong: that the engines share a link, that a copy cannot be interrupted,
all that happens between anchors, and that what a codec leaves has to be there. Of the memory while something is rebuilt
it knows whether there is room for it at all, and that a chain of rebuilds stays (bound_rebuilds.py).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from vdnn.planning.bound.anchors import choose_anchors
from vdnn.planning.bound.linear_program import LinearProgram
from vdnn.planning.bound.recompute_moments import RebuildMoments
from vdnn.planning.bound.recomputes import RebuiltBy
from vdnn.planning.costs import LinkCosts
from vdnn.planning.footprint import absent_intervals
from vdnn.planning.gaps import Gap, gaps_of
from vdnn.planning.least_memory import require_feasible_budget
from vdnn.planning.recomputing import candidates_of
from vdnn.step.plan import Absence
from vdnn.step.recording import Recording

# Intervals looked at: more make the bound tighter and the program larger. As many as make so many variables: few at
# first, and more as long as that raises the bound by a part of what it lacks to the plan at hand.
_AWAY = (1_500, 6_000, 30_000)
_AWAY_WITH_REBUILDS = (1_500, 5_000)  # what is rebuilt makes a program of as many several times as long
_WORTH_MORE = 0.1
_LEAST_ANCHORS = 8
# The second program is for steps of few gaps, at so many anchors that there are so many whole numbers. Nodes of the
# search are counted, not seconds: with 500 it certifies more, and takes up to a minute and a half.
_MOST_GAPS = 120
_MOST_GAPS_WITH_REBUILDS = 12  # there it takes as long, and says little more
_MOST_WHOLE = 1500
_NODES = 100
_MOST_SUMS = 1 << 16
_CLOSE = 5e-3  # so near to a plan at hand a bound is not looked at again
_LARGEST = 100.0  # the program counts in such units that the largest storage and its copy have this size
# What solvers may be wrong by.
_TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True)
class Bound:
    """`step_ns`: no plan under the budget has a shorter step. `is_whole`: found with whole storages, not parts."""

    step_ns: int
    is_whole: bool

    def gap(self, step_ns: int) -> float:
        """How far from optimal a plan is at most, as a fraction."""
        return max(0.0, step_ns / self.step_ns - 1) if self.step_ns else 0.0


def lower_bound(
    recording: Recording,
    costs: LinkCosts,
    budget_bytes: int,
    *,
    anchors: int | None = None,
    enough_ns: int | None = None,
    nodes: int = _NODES,
) -> Bound:
    """Raises BudgetError where no plan is under the budget. Needs SciPy: the extra `plan`. A bound of `enough_ns`, such
    as the step of a plan that is at hand, need not be improved."""
    require_feasible_budget(recording, budget_bytes)
    if recording.peak_bytes <= budget_bytes:
        return Bound(recording.compute_ns, is_whole=True)
    gaps, rebuilds = gaps_of(recording), bool(candidates_of(recording))
    away = list(_AWAY_WITH_REBUILDS if rebuilds else _AWAY)
    if enough_ns is None:
        away = away[-1:]
    least_ns = 0
    for most in [anchors] if anchors else sorted({max(_LEAST_ANCHORS, count // len(gaps)) for count in away}):
        found_ns = recording.compute_ns + _Program(recording, gaps, costs, budget_bytes, most, is_whole=False).solve()
        raised_ns, least_ns = found_ns - least_ns, max(least_ns, found_ns)
        if enough_ns is not None and least_ns >= enough_ns * (1 - _CLOSE):
            return Bound(least_ns, is_whole=False)
        if enough_ns is not None and raised_ns < _WORTH_MORE * (enough_ns - least_ns):
            break
    if len(gaps) > (_MOST_GAPS_WITH_REBUILDS if rebuilds else _MOST_GAPS):
        return Bound(least_ns, is_whole=False)
    most = anchors or max(_LEAST_ANCHORS, _MOST_WHOLE // (2 * len(gaps)))
    whole = _Program(recording, gaps, costs, budget_bytes, most, is_whole=True)
    return Bound(max(least_ns, recording.compute_ns + whole.solve(nodes)), is_whole=True)


@dataclass(frozen=True, slots=True)
class _Columns:
    """Of one gap, by anchor: given up by then, and asked back by then; `ever` is the former at its last anchor. In the
    first program there is one number, whether it is away, and `back` is empty."""

    gone: dict[int, int]
    back: dict[int, int]
    ever: int


class _Program:
    """Variables: how much longer than its computing the step has taken up to each point; what each gap does at each
    anchor; what is rebuilt; and running sums of copies, which keep the program sparse."""

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
        # Of several gaps of one storage only one at a time may stand for its copy out: there is but one.
        self._gone_often = {gap.lifetime for gap in gaps if gap.number > 0}
        self._costs = costs
        self._of_bytes = _LARGEST / max(gap.nbytes for gap in gaps)
        slowest = min(costs.to_host_bytes_per_s, costs.to_device_bytes_per_s)
        self._of_ns = self._of_bytes * slowest / 1e9
        self._reached_ns = list(itertools.accumulate(point.compute_ns for point in recording.points))
        self._missing = [point.peak_bytes - budget_bytes for point in recording.points]
        self._program = LinearProgram()
        self._program.new_columns(len(recording.points), is_bounded=False)
        for before, point in itertools.pairwise(range(len(recording.points))):
            self._program.require([(point, 1.0), (before, -1.0)], 0.0)
        chosen = choose_anchors(self._missing, gaps, anchors)
        self._rebuilt = self._add_rebuilds()
        self._moments = RebuildMoments(recording, gaps, budget_bytes)
        self._rebuilt_by = RebuiltBy(self._program, self._moments, self._rebuilt)
        self._of_gaps = {gap: columns for gap in gaps if (columns := self._add_gap(gap, chosen)) is not None}
        for anchor in chosen:
            self._add_anchor(anchor)

    def _add_gap(self, gap: Gap, anchors: Sequence[int]) -> _Columns | None:
        inside = [anchor for anchor in anchors if gap.first <= anchor <= gap.last]
        if not inside:
            return None
        gone = dict(zip(inside, self._program.new_columns(len(inside)), strict=True))
        if not self._is_whole:
            return _Columns(gone, {}, gone[inside[-1]])
        back = {} if gap.use is None else dict(zip(inside, self._program.new_columns(len(inside)), strict=True))
        for columns in (gone, back):
            for earlier, later in itertools.pairwise(columns.values()):
                self._program.require([(later, 1.0), (earlier, -1.0)], 0.0)
        for anchor, column in back.items():
            self._program.require([(gone[anchor], 1.0), (column, -1.0)], 0.0)
        return _Columns(gone, back, gone[inside[-1]])

    def _away_until_rebuilt(self, lifetime: int) -> range:
        """At most: a rebuild for another's sake comes earlier."""
        found = self._recording.lifetimes[lifetime]
        assert found.rebuild is not None, "a candidate"
        return absent_intervals(found, Absence(found.rebuild.known_point))

    def _add_rebuilds(self) -> dict[int, int]:
        """A column for each that can be; it takes its time after the first use of all and before its own."""
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
            rebuild = lifetimes[lifetime].rebuild
            assert rebuild is not None, "a candidate"
            terms = [(columns[lifetime], -rebuild.compute_ns * self._of_ns)]
            if total is not None:
                terms.append((total, -1.0))
            (total,) = self._program.new_columns(1, is_bounded=False)
            self._program.require([(total, 1.0), *terms], 0.0)
            self._program.require([(use, 1.0), (total, -1.0), *((column, -factor) for column, factor in before)], 0.0)
        return columns

    def _add_anchor(self, anchor: int) -> None:
        away: list[tuple[int, float]] = []
        out: list[tuple[int, tuple[int, float]]] = []  # where its copy could begin, and the copy
        home: list[tuple[int, list[tuple[int, float]]]] = []
        for gap, columns in self._of_gaps.items():
            out_time = self._copy_time(gap, self._costs.to_host_bytes_per_s)
            home_time = self._copy_time(gap, self._costs.to_device_bytes_per_s)
            copy_point = self._recording.lifetimes[gap.lifetime].copy_point
            if anchor in columns.gone:
                if gap.lifetime in self._rebuilt:  # what is rebuilt is not moved
                    self._program.require([(columns.gone[anchor], -1.0), (self._rebuilt[gap.lifetime], -1.0)], -1.0)
                gone, nbytes = columns.gone[anchor], gap.nbytes * self._of_bytes
                away.append((gone, nbytes))
                out.append((copy_point, (gone, out_time)))
                if anchor in columns.back:
                    away.append((columns.back[anchor], -nbytes))
                    home.append((gap.last, [(columns.ever, home_time), (columns.back[anchor], -home_time)]))
                elif not self._is_whole:  # where it is not used again the second program does not know when it is back
                    due = self._due_for_a_rebuild(gap, anchor, gone)
                    home += [(use, [(column, home_time)]) for use, column in due]
                    if gap.use is not None:
                        home.append((gap.last, [(gone, home_time), *((column, -home_time) for _, column in due)]))
            elif self._is_whole and gap.last < anchor and gap.lifetime not in self._gone_often:
                out.append((copy_point, (columns.ever, out_time)))
            elif self._is_whole and gap.first > anchor and gap.use is not None:
                home.append((gap.last, [(columns.ever, home_time)]))
        for lifetime, column in self._rebuilt.items():
            if anchor in self._away_until_rebuilt(lifetime):
                nbytes = self._recording.lifetimes[lifetime].nbytes * self._of_bytes
                away.append((self._away_yet(lifetime, column, anchor), nbytes))
        self._program.require(away, self._missing_of_whole(anchor) * self._of_bytes)
        for point, busy in self._running_sums([(point, [copy]) for point, copy in sorted(out, reverse=True)]):
            # From where the copies could begin to where the interval begins, behind the hook before it.
            self._require_time(busy, point, anchor - 1)
        for use, busy in self._running_sums(sorted(home, key=lambda one: one[0])):
            self._require_time(busy, anchor, use)

    def _away_yet(self, lifetime: int, rebuilt: int, anchor: int) -> int:
        """A column: away at an anchor before its first use, and not rebuilt by then for another."""
        by_then = self._rebuilt_by.by(lifetime, anchor - 1)
        if not by_then:
            return rebuilt
        (away,) = self._program.new_columns(1)
        self._program.require([(rebuilt, 1.0), (away, -1.0), *((column, -factor) for column, factor in by_then)], 0.0)
        return away

    def _due_for_a_rebuild(self, gap: Gap, anchor: int, gone: int) -> list[tuple[int, int]]:
        """A use within the gap at which its storage has to be there if it is away at the anchor: the first at which
        another is rebuilt from it. With a column that is 1 if that is so, unless that one was rebuilt earlier, for what
        is made from it in turn."""
        readers = ((self._moments.first_use(one), one) for one in self._moments.made_from.get(gap.lifetime, ()))
        found = [(use, reader) for use, reader in readers if anchor <= use < gap.last]
        if not found:
            return []
        use, reader = min(found)
        (due,) = self._program.new_columns(1)
        earlier = self._rebuilt_by.by(reader, use - 1)
        self._program.require([(due, 1.0), (gone, -1.0), (self._rebuilt[reader], -1.0), *earlier], -1.0)
        self._program.require([(gone, 1.0), (due, -1.0)], 0.0)
        return [(use, due)]

    def _missing_of_whole(self, anchor: int) -> int:
        """What is away is whole storages: so it is at least the least sum of some that is not below what is missing.
        That is what is left when as much as fits is kept; looked for where there are not too many sums."""
        lifetimes = self._recording.lifetimes
        away = {gap.lifetime for gap, columns in self._of_gaps.items() if anchor in columns.gone}
        away |= {lifetime for lifetime in self._rebuilt if anchor in self._away_until_rebuilt(lifetime)}
        parts = [lifetimes[lifetime].nbytes for lifetime in away]
        room = sum(parts) - self._missing[anchor]
        unit = math.gcd(*parts)
        if not parts or room < 0 or room // unit > _MOST_SUMS:
            return self._missing[anchor]
        within = (1 << (room // unit + 1)) - 1
        sums = 1  # a bit for each that can be kept, in units
        for nbytes in parts:
            sums |= (sums << (nbytes // unit)) & within
        return sum(parts) - (sums.bit_length() - 1) * unit

    def _running_sums(self, copies: Sequence[tuple[int, list[tuple[int, float]]]]) -> Iterator[tuple[int, int]]:
        """For each of the points, which come in order, a column that is the time of all copies up to it."""
        total: int | None = None
        for place, (point, copy) in enumerate(copies):
            terms = [(column, -factor) for column, factor in copy]
            if total is not None:
                terms.append((total, -1.0))
            (total,) = self._program.new_columns(1, is_bounded=False)
            self._program.require([(total, 1.0), *terms], 0.0)
            if place + 1 == len(copies) or copies[place + 1][0] != point:
                yield point, total

    def _copy_time(self, gap: Gap, bytes_per_s: float) -> float:
        return (gap.nbytes / bytes_per_s * 1e9 + self._costs.latency_ns) * self._of_ns

    def _require_time(self, busy: int, begin: int, end: int) -> None:
        """From reaching point `begin` to leaving point `end` there is time for the copies."""
        computed = (self._reached_ns[end] - self._reached_ns[begin]) * self._of_ns
        stalls = [(end, 1.0), *([(begin - 1, -1.0)] if begin > 0 else [])]
        self._program.require([(busy, -1.0), *stalls], -computed)

    def solve(self, nodes: int = _NODES) -> int:
        """The least time by which the step is longer than its computing, in ns, rounded down. With whole numbers
        `nodes` of the solver's tree are looked at."""
        least = self._program.least_of(len(self._recording.points) - 1, nodes if self._is_whole else None)
        if least is None:
            return 0  # stopped before it knew anything
        return max(0, int((least * (1 - _TOLERANCE) - _TOLERANCE) / self._of_ns))
