"""A certified lower bound on the step time under a budget: no plan has a shorter step.

lower_bound() solves up to three programs (stall_program.py): a linear program; for small steps one in which storages
are whole; and where storages can be recomputed and the bound is far from the plan at hand, one with integers for the
choice of recomputes only, whose choice plans may try. Nor is a step shorter than the time in which the host issues it
(below). It needs SciPy, and raises BudgetError if no plan is under the budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vdnn.planning.bound.stall_program import StallProgram
from vdnn.planning.costs import LinkCosts
from vdnn.planning.footprint import absent_intervals
from vdnn.planning.gaps import Gap, gaps_of
from vdnn.planning.least_memory import require_feasible_budget
from vdnn.planning.recomputing import candidates_of, host_cost_ns
from vdnn.step.plan import Absence
from vdnn.step.recording import Recording

# More anchors make the bound tighter and the program larger. The number of anchors is such that there are this many
# variables: few at first, and more as long as that closes this part of the difference to the plan at hand.
_VARIABLES = (1_500, 6_000, 30_000)
_VARIABLES_WITH_RECOMPUTES = (1_500, 5_000)  # with recomputes, as many variables take the solver several times as long
_WORTH_MORE = 0.1
_LEAST_ANCHORS = 8
# The second program runs for steps with at most _MOST_GAPS gaps, and gets anchors for at most _MOST_WHOLE integers. Its
# effort is limited by nodes of the search, not seconds: with 500 it certifies more, and takes up to 90 seconds.
_MOST_GAPS = 120
_MOST_GAPS_WITH_RECOMPUTES = 12  # with recomputes it takes as long, and says little more
_MOST_WHOLE = 1500
_NODES = 100
# The third program runs if the plan at hand is at least _FAR above the bound and at most _MOST_CHOSEN storages can be
# recomputed. It stops after the first node: for ResNet-50, a hundred more did not raise its answer.
_FAR = 0.03
_MOST_CHOSEN = 400
_VARIABLES_WITH_WHOLE_RECOMPUTES = 1_800
_CLOSE = 5e-3  # a bound that is this close to the plan at hand is not improved


@dataclass(frozen=True, slots=True)
class Bound:
    """No plan under the budget has a step shorter than `step_ns`. `is_whole`: the bound was found with whole storages,
    not with parts of them. `recomputes`: the choice of the third program, if it was solved."""

    step_ns: int
    is_whole: bool
    recomputes: frozenset[int] = frozenset()

    def gap(self, step_ns: int) -> float:
        """The largest possible distance of a plan with this step from the optimum, as a fraction."""
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
    """A lower bound on the step of every plan under the budget. See [Note: The relaxation] in stall_program.py.

    `enough_ns`: the step of a plan at hand; a bound close to it is not improved. `anchors`: a fixed number of anchors.
    `nodes`: the effort of the second program. Raises BudgetError if no plan is under the budget. Needs SciPy, the extra
    `plan`.
    """
    require_feasible_budget(recording, budget_bytes)
    if recording.peak_bytes <= budget_bytes:
        return Bound(recording.kept_ns, is_whole=True)
    gaps, recomputes = gaps_of(recording), bool(candidates_of(recording))
    variables = list(_VARIABLES_WITH_RECOMPUTES if recomputes else _VARIABLES)
    if enough_ns is None:
        variables = variables[-1:]
    least_ns = host_bound_ns(recording, gaps, costs, budget_bytes)
    if enough_ns is not None and least_ns >= enough_ns * (1 - _CLOSE):
        return Bound(least_ns, is_whole=False)
    found_before_ns = 0
    for most in [anchors] if anchors else sorted({max(_LEAST_ANCHORS, count // len(gaps)) for count in variables}):
        first = StallProgram(recording, gaps, costs, budget_bytes, most, is_whole=False)
        found_ns = recording.compute_ns + first.solve(nodes)
        raised_ns, found_before_ns = found_ns - found_before_ns, max(found_before_ns, found_ns)
        least_ns = max(least_ns, found_ns)
        if enough_ns is not None and least_ns >= enough_ns * (1 - _CLOSE):
            return Bound(least_ns, is_whole=False)
        if enough_ns is not None and raised_ns < _WORTH_MORE * (enough_ns - least_ns):
            break
    if len(gaps) <= (_MOST_GAPS_WITH_RECOMPUTES if recomputes else _MOST_GAPS):
        most = anchors or max(_LEAST_ANCHORS, _MOST_WHOLE // (2 * len(gaps)))
        whole = StallProgram(recording, gaps, costs, budget_bytes, most, is_whole=True)
        whole_ns = recording.compute_ns + whole.solve(nodes)
        return Bound(max(least_ns, whole_ns), is_whole=whole_ns >= least_ns)
    chosen = frozenset[int]()
    if enough_ns is not None and enough_ns > least_ns * (1 + _FAR) and len(candidates_of(recording)) <= _MOST_CHOSEN:
        most = anchors or max(_LEAST_ANCHORS, _VARIABLES_WITH_WHOLE_RECOMPUTES // len(gaps))
        third = StallProgram(recording, gaps, costs, budget_bytes, most, is_whole=False)
        least_ns = max(least_ns, recording.compute_ns + third.solve_with_whole_recomputes())
        chosen = third.chosen_recomputes()
    return Bound(least_ns, is_whole=False, recomputes=chosen)


# A lower bound on the time in which the host issues a step under a budget.
#
# Whatever the plan, the host issues the operations of the step. In each interval that is over the budget with
# everything kept, enough bytes are absent: each storage that is absent there was copied to the host and, if a use
# follows, back, or it is recomputed. The least host time for these bytes, with parts of storages allowed, belongs to
# the step as well. The other needs of a recompute, such as the recompute of its inputs, are left out. That makes the
# bound lower, never wrong.


def host_bound_ns(recording: Recording, gaps: Sequence[Gap], costs: LinkCosts, budget_bytes: int) -> int:
    """No plan under the budget is issued in less time. 0 if nothing is known of the host."""
    if not recording.has_host:
        return 0
    ways = _ways_of(recording, gaps, costs)
    missing = [point.peak_bytes - budget_bytes for point in recording.points]
    most = 0.0
    for interval in sorted(range(len(missing)), key=lambda one: -missing[one])[:_INTERVALS]:
        if missing[interval] > 0:
            most = max(most, _least_ns(ways, interval, missing[interval]))
    return recording.issue_ns + int(most)


_INTERVALS = 50  # those over the budget by the most are considered


# For a lifetime: its intervals of absence, its bytes, and the host time of the absence.
_Way = tuple[int, range, int, int]


def _ways_of(recording: Recording, gaps: Sequence[Gap], costs: LinkCosts) -> list[_Way]:
    """All ways to be absent, the least host time for each byte first."""
    ways = [
        (gap.lifetime, range(gap.first, gap.last + 1), gap.nbytes, costs.issue_ns * (1 if gap.use is None else 2))
        for gap in gaps
    ]
    for index in candidates_of(recording):
        lifetime = recording.lifetimes[index]
        recompute = lifetime.recompute
        if recompute is not None:
            intervals = absent_intervals(lifetime, Absence(recompute.known_point))
            # A recompute that nobody asks for takes no time.
            issue_ns = host_cost_ns(recompute) - (0 if lifetime.uses else recompute.issue_ns)
            ways.append((index, intervals, lifetime.nbytes, issue_ns))
    return sorted(ways, key=lambda way: way[3] / way[2])


def _least_ns(ways: Sequence[_Way], interval: int, missing: int) -> float:
    spent, seen = 0.0, set[int]()
    for lifetime, intervals, nbytes, issue_ns in ways:
        if interval in intervals and lifetime not in seen:
            seen.add(lifetime)
            spent += issue_ns * min(1.0, missing / nbytes)
            missing -= nbytes
            if missing <= 0:
                break
    return spent
