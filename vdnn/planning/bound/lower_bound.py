"""A certified lower bound on the step time under a budget: no plan has a shorter step.

lower_bound() relaxes the problem to a linear program, and for small steps to one with integers. It needs SciPy, and
raises BudgetError if no plan is under the budget.

[Note: The relaxation] A plan is considered at the anchors only: intervals that are over the budget with everything
kept. At an anchor, enough bytes are absent. An absent storage was copied to the host after its copy point, and has to
be reloaded before its use. Each engine does one copy at a time. So from a copy point to the anchor, the step takes at
least as long as the copies to the host that began after that point; from the anchor to a use, at least as long as the
reloads that end before that use. A recomputed storage is absent until its first use without any copies, and its compute
time is added to the step. Its inputs are on the device at that time: a recomputed input is no longer absent, and an
offloaded one has been reloaded. The shortest step that satisfies all this is a linear program.

[Note: The second program] If a difference to the plan at hand remains and the step is small, a program with integers
says more. It has two numbers for each gap and anchor: released by then, and reloaded by then. Both can only grow.

[Note: Left out] The relaxation leaves out that the engines share a link, that a copy cannot be interrupted, everything
between anchors, and that what a codec leaves takes memory. This makes the bound lower, never wrong. Of the memory
during a recompute, it includes whether there is room for it at all, and that a chain of recomputes stays on the device
(recomputes.py).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from vdnn.planning.bound.anchors import choose_anchors
from vdnn.planning.bound.linear_program import LinearProgram
from vdnn.planning.bound.recompute_moments import RecomputeMoments
from vdnn.planning.bound.recomputes import RecomputedBy
from vdnn.planning.costs import LinkCosts
from vdnn.planning.footprint import absent_intervals
from vdnn.planning.gaps import Gap, gaps_of
from vdnn.planning.least_memory import require_feasible_budget
from vdnn.planning.recomputing import candidates_of
from vdnn.step.plan import Absence
from vdnn.step.recording import Recording

# More anchors make the bound tighter and the program larger. The number of anchors is such that there are this many
# variables: few at first, and more as long as that closes this part of the difference to the plan at hand.
_VARIABLES = (1_500, 6_000, 30_000)
_VARIABLES_WITH_RECOMPUTES = (1_500, 5_000)  # with recomputes, as many variables take the solver several times as long
_WORTH_MORE = 0.1
_LEAST_ANCHORS = 8
# The second program is for steps of few gaps, with so many anchors that there are this many integers. The effort is
# counted in nodes of the search, not seconds: with 500 it certifies more, and takes up to a minute and a half.
_MOST_GAPS = 120
_MOST_GAPS_WITH_RECOMPUTES = 12  # with recomputes it takes as long, and says little more
_MOST_WHOLE = 1500
_NODES = 100
_MOST_SUMS = 1 << 16
_CLOSE = 5e-3  # a bound that is this close to the plan at hand is not improved
_LARGEST = 100.0  # the unit of the program: the largest storage and its copy have this size
_TOLERANCE = 1e-6  # the solver's error


@dataclass(frozen=True, slots=True)
class Bound:
    """No plan under the budget has a step shorter than `step_ns`. `is_whole`: the bound was found with whole storages,
    not with parts of them."""

    step_ns: int
    is_whole: bool

    def gap(self, step_ns: int) -> float:
        """The most that a plan with this step can be from optimal, as a fraction."""
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
    """A lower bound on the step of every plan under the budget. See [Note: The relaxation].

    `enough_ns`: the step of a plan at hand; a bound close to it is not improved. `anchors`: a fixed number of anchors.
    `nodes`: the effort of the second program. Raises BudgetError if no plan is under the budget. Needs SciPy, the extra
    `plan`.
    """
    require_feasible_budget(recording, budget_bytes)
    if recording.peak_bytes <= budget_bytes:
        return Bound(recording.compute_ns, is_whole=True)
    gaps, recomputes = gaps_of(recording), bool(candidates_of(recording))
    variables = list(_VARIABLES_WITH_RECOMPUTES if recomputes else _VARIABLES)
    if enough_ns is None:
        variables = variables[-1:]
    least_ns = 0
    for most in [anchors] if anchors else sorted({max(_LEAST_ANCHORS, count // len(gaps)) for count in variables}):
        found_ns = recording.compute_ns + _Program(recording, gaps, costs, budget_bytes, most, is_whole=False).solve()
        raised_ns, least_ns = found_ns - least_ns, max(least_ns, found_ns)
        if enough_ns is not None and least_ns >= enough_ns * (1 - _CLOSE):
            return Bound(least_ns, is_whole=False)
        if enough_ns is not None and raised_ns < _WORTH_MORE * (enough_ns - least_ns):
            break
    if len(gaps) > (_MOST_GAPS_WITH_RECOMPUTES if recomputes else _MOST_GAPS):
        return Bound(least_ns, is_whole=False)
    most = anchors or max(_LEAST_ANCHORS, _MOST_WHOLE // (2 * len(gaps)))
    whole = _Program(recording, gaps, costs, budget_bytes, most, is_whole=True)
    return Bound(max(least_ns, recording.compute_ns + whole.solve(nodes)), is_whole=True)


@dataclass(frozen=True, slots=True)
class _Columns:
    """The columns of one gap, by anchor: released by then, and reloaded by then. `ever` is `released` at the last
    anchor. In the first program `released` says whether the gap is absent, and `reloaded` is empty."""

    released: dict[int, int]
    reloaded: dict[int, int]
    ever: int


class _Program:
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
        absent: list[tuple[int, float]] = []
        offloads: list[tuple[int, tuple[int, float]]] = []  # copy point, and the copy
        reloads: list[tuple[int, list[tuple[int, float]]]] = []
        for gap, columns in self._columns_of.items():
            offload_time = self._copy_time(gap, self._costs.to_host_bytes_per_s)
            reload_time = self._copy_time(gap, self._costs.to_device_bytes_per_s)
            copy_point = self._recording.lifetimes[gap.lifetime].copy_point
            if anchor in columns.released:
                released, nbytes = columns.released[anchor], gap.nbytes * self._unit_per_byte
                if gap.lifetime in self._recomputed:  # a recomputed storage is not offloaded
                    self._program.require([(released, -1.0), (self._recomputed[gap.lifetime], -1.0)], -1.0)
                absent.append((released, nbytes))
                offloads.append((copy_point, (released, offload_time)))
                if anchor in columns.reloaded:
                    absent.append((columns.reloaded[anchor], -nbytes))
                    terms = [(columns.ever, reload_time), (columns.reloaded[anchor], -reload_time)]
                    reloads.append((gap.last, terms))
                elif not self._is_whole:  # the second program has no reload column for a gap without a use
                    due = self._due_for_a_recompute(gap, anchor, released)
                    reloads += [(use, [(column, reload_time)]) for use, column in due]
                    if gap.use is not None:
                        terms = [(released, reload_time), *((column, -reload_time) for _, column in due)]
                        reloads.append((gap.last, terms))
            elif self._is_whole and gap.last < anchor and gap.lifetime not in self._with_several_gaps:
                offloads.append((copy_point, (columns.ever, offload_time)))
            elif self._is_whole and gap.first > anchor and gap.use is not None:
                reloads.append((gap.last, [(columns.ever, reload_time)]))
        for lifetime, column in self._recomputed.items():
            if anchor in self._absent_until_recomputed(lifetime):
                nbytes = self._recording.lifetimes[lifetime].nbytes * self._unit_per_byte
                absent.append((self._absent_still(lifetime, column, anchor), nbytes))
        self._program.require(absent, self._missing_of_whole(anchor) * self._unit_per_byte)
        for point, busy in self._running_sums([(point, [copy]) for point, copy in sorted(offloads, reverse=True)]):
            # From the copy point to the start of the interval, after the hook at the point before it.
            self._require_time(busy, point, anchor - 1)
        for use, busy in self._running_sums(sorted(reloads, key=lambda one: one[0])):
            self._require_time(busy, anchor, use)

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

    def _due_for_a_recompute(self, gap: Gap, anchor: int, released: int) -> list[tuple[int, int]]:
        """The first use within the gap at which another storage is recomputed from this one, with a column. The column
        is 1 if the storage is absent at the anchor and that use needs it. It is 0 if the other storage was recomputed
        earlier, for a recompute of its own readers. Empty if there is no such use."""
        readers = ((self._moments.first_use(one), one) for one in self._moments.made_from.get(gap.lifetime, ()))
        found = [(use, reader) for use, reader in readers if anchor <= use < gap.last]
        if not found:
            return []
        use, reader = min(found)
        (due,) = self._program.new_columns(1)
        earlier = self._recomputed_by.by(reader, use - 1)
        self._program.require([(due, 1.0), (released, -1.0), (self._recomputed[reader], -1.0), *earlier], -1.0)
        self._program.require([(released, 1.0), (due, -1.0)], 0.0)
        return [(use, due)]

    def _missing_of_whole(self, anchor: int) -> int:
        """The least bytes that are absent at the anchor, counted in whole storages: the least sum of sizes that is not
        below the missing bytes. It is what remains if as much as fits is kept. Only the missing bytes themselves if
        there are too many sums."""
        lifetimes = self._recording.lifetimes
        absent = {gap.lifetime for gap, columns in self._columns_of.items() if anchor in columns.released}
        absent |= {lifetime for lifetime in self._recomputed if anchor in self._absent_until_recomputed(lifetime)}
        parts = [lifetimes[lifetime].nbytes for lifetime in absent]
        room = sum(parts) - self._missing[anchor]
        unit = math.gcd(*parts)
        if not parts or room < 0 or room // unit > _MOST_SUMS:
            return self._missing[anchor]
        within = (1 << (room // unit + 1)) - 1
        sums = 1  # bit i is set if storages of i units in total can be kept
        for nbytes in parts:
            sums |= (sums << (nbytes // unit)) & within
        return sum(parts) - (sums.bit_length() - 1) * unit

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

    def _require_time(self, busy: int, begin: int, end: int) -> None:
        """The step takes at least as long as the copies, from reaching point `begin` to leaving point `end`."""
        computed = (self._reached_ns[end] - self._reached_ns[begin]) * self._unit_per_ns
        stalls = [(end, 1.0), *([(begin - 1, -1.0)] if begin > 0 else [])]
        self._program.require([(busy, -1.0), *stalls], -computed)

    def solve(self, nodes: int = _NODES) -> int:
        """The least stall of the step in ns, rounded down. The second program stops after `nodes` nodes."""
        least = self._program.least_of(len(self._recording.points) - 1, nodes if self._is_whole else None)
        if least is None:
            return 0  # the solver stopped before it had a bound
        return max(0, int((least * (1 - _TOLERANCE) - _TOLERANCE) / self._unit_per_ns))
