"""How short the step can be at best under a budget: a certified lower bound, by relaxation.

No plan has a shorter step, whatever its order of copies, its release and its reload points. A plan is seen at some
intervals only, the anchors, each of which would not fit with everything kept. At an anchor enough bytes are away
(`away`, of each gap between 0 and 1). What is away there has been copied out since its copy could begin, and has to be
copied back before it is used, by engines that do one copy at a time: so between any such point and the anchor the step
takes at least as long as the copies out, and between the anchor and any use at least as long as the copies back. The
shortest step for which all this holds is a linear program; with `away` whole numbers, which small steps allow, it is
often the optimum itself.

What is left out makes the bound lower, never wrong: that the engines share a link, that a copy cannot be interrupted,
that one gap is away at consecutive intervals.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from vdnn.errors import VdnnError
from vdnn.planning.costs import LinkCosts
from vdnn.planning.gaps import Gap, gaps_of
from vdnn.planning.least_memory import require_feasible_budget
from vdnn.recording import Recording

# Intervals looked at: more make the bound tighter and the program larger. As many as make so many variables.
_MOST_AWAY = 30_000
_LEAST_ANCHORS = 8
# Up to here `away` is asked to be whole. Nodes of the search are counted, not seconds.
_MOST_WHOLE = 1500
_NODES = 2000
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


def lower_bound(recording: Recording, costs: LinkCosts, budget_bytes: int, anchors: int | None = None) -> Bound:
    """Raises BudgetError where no plan is under the budget. Needs SciPy: the extra `plan`."""
    require_feasible_budget(recording, budget_bytes)
    if recording.peak_bytes <= budget_bytes:
        return Bound(recording.compute_ns, is_whole=True)
    gaps = gaps_of(recording)
    program = _Program(recording, gaps, costs, budget_bytes, anchors or max(_LEAST_ANCHORS, _MOST_AWAY // len(gaps)))
    stalled_ns = program.solve(whole=False)
    is_whole = program.is_small
    if is_whole:
        stalled_ns = max(stalled_ns, program.solve(whole=True))
    return Bound(recording.compute_ns + stalled_ns, is_whole)


class _Program:
    """Variables: how long the step has stood still up to each point; then for each anchor `away` of each gap, and
    running sums of copies, which keep the program sparse."""

    def __init__(
        self, recording: Recording, gaps: Sequence[Gap], costs: LinkCosts, budget_bytes: int, anchors: int
    ) -> None:
        self._recording = recording
        self._costs = costs
        self._gaps = gaps
        self._of_bytes = _LARGEST / max(gap.nbytes for gap in gaps)
        slowest = min(costs.to_host_bytes_per_s, costs.to_device_bytes_per_s)
        self._of_ns = self._of_bytes * slowest / 1e9
        self._reached_ns = list(itertools.accumulate(point.compute_ns for point in recording.points))
        self._missing = [point.peak_bytes - budget_bytes for point in recording.points]
        self._entries: list[tuple[int, int, float]] = []  # row, column, factor
        self._least: list[float] = []  # of each row
        self._columns = len(recording.points)
        self._unbounded = list(range(self._columns))
        for before, point in itertools.pairwise(range(len(recording.points))):
            self._require([(point, 1.0), (before, -1.0)], 0.0)
        for anchor in self._anchors(anchors):
            self._add_anchor(anchor)

    @property
    def is_small(self) -> bool:
        return self._columns - len(self._unbounded) <= _MOST_WHOLE

    def _anchors(self, most: int) -> list[int]:
        """The intervals that would not fit: all, or the worst and others evenly between the first and the last."""
        over = [interval for interval, missing in enumerate(self._missing) if missing > 0]
        if len(over) <= most:
            return over
        chosen = {over[round(place * (len(over) - 1) / (most - 1))] for place in range(most)}
        return sorted(chosen | {max(over, key=lambda interval: self._missing[interval])})

    def _require(self, terms: Sequence[tuple[int, float]], least: float) -> None:
        self._entries += [(len(self._least), column, factor) for column, factor in terms]
        self._least.append(least)

    def _add_anchor(self, anchor: int) -> None:
        here = [gap for gap in self._gaps if gap.first <= anchor <= gap.last]
        away = {gap: self._columns + place for place, gap in enumerate(here)}
        self._columns += len(here)
        self._require(
            [(away[gap], gap.nbytes * self._of_bytes) for gap in here], self._missing[anchor] * self._of_bytes
        )
        lifetimes = self._recording.lifetimes
        copied = sorted(here, key=lambda gap: -lifetimes[gap.lifetime].copy_point)
        for point, busy in self._running_sums(
            [(away[gap], self._copy_time(gap, self._costs.to_host_bytes_per_s)) for gap in copied],
            [lifetimes[gap.lifetime].copy_point for gap in copied],
        ):
            # From where the copies could begin to where the interval begins, behind the hook before it.
            self._require_time(busy, point, anchor - 1)
        used = sorted((gap for gap in here if gap.use is not None), key=lambda gap: gap.last)
        for use, busy in self._running_sums(
            [(away[gap], self._copy_time(gap, self._costs.to_device_bytes_per_s)) for gap in used],
            [gap.use for gap in used if gap.use is not None],
        ):
            self._require_time(busy, anchor, use)

    def _running_sums(self, copies: Sequence[tuple[int, float]], points: Sequence[int]) -> Iterator[tuple[int, int]]:
        """For each of the points, which come in order, a column that is the time of all copies up to it."""
        total: int | None = None
        for place, point in enumerate(points):
            terms = [(copies[place][0], -copies[place][1])]
            if total is not None:
                terms.append((total, -1.0))
            total = self._columns
            self._columns += 1
            self._unbounded.append(total)
            self._require([(total, 1.0), *terms], 0.0)
            if place + 1 == len(points) or points[place + 1] != point:
                yield point, total

    def _copy_time(self, gap: Gap, bytes_per_s: float) -> float:
        return (gap.nbytes / bytes_per_s * 1e9 + self._costs.latency_ns) * self._of_ns

    def _require_time(self, busy: int, begin: int, end: int) -> None:
        """From reaching point `begin` to leaving point `end` there is time for the copies."""
        computed = (self._reached_ns[end] - self._reached_ns[begin]) * self._of_ns
        stalls = [(end, 1.0), *([(begin - 1, -1.0)] if begin > 0 else [])]
        self._require([(busy, -1.0), *stalls], -computed)

    def solve(self, *, whole: bool) -> int:
        """The least time that the step stands still, in ns, rounded down."""
        scipy = _scipy()
        rows, columns, factors = zip(*self._entries, strict=True)
        matrix = scipy.sparse.csr_matrix((factors, (rows, columns)), shape=(len(self._least), self._columns))
        upper, integrality = [1.0] * self._columns, [int(whole)] * self._columns
        for column in self._unbounded:
            upper[column], integrality[column] = float("inf"), 0
        objective = [0.0] * self._columns
        objective[len(self._recording.points) - 1] = 1.0
        solution = scipy.optimize.milp(
            objective,
            constraints=scipy.optimize.LinearConstraint(matrix, lb=self._least),
            bounds=scipy.optimize.Bounds([0.0] * self._columns, upper),
            integrality=integrality,
            options={"node_limit": _NODES} if whole else {},
        )
        least = solution.mip_dual_bound if whole else solution.fun
        if least is None:
            if whole:
                return 0  # stopped before it knew anything
            raise VdnnError(f"bound: the solver gave up: {solution.message}")
        return max(0, int((least * (1 - _TOLERANCE) - _TOLERANCE) / self._of_ns))


def _scipy() -> Any:
    """Imported late: only who asks for a bound needs it."""
    try:
        import scipy.optimize
        import scipy.sparse
    except ImportError:
        raise VdnnError("the bound of a plan needs SciPy, which is not installed: pip install 'vdnn[plan]'.") from None
    return scipy
