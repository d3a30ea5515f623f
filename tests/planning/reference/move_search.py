"""The readable form of csrc/planning/move_search.h: which storages are offloaded, and when each is away.

Local search from all gaps and from covers, under a series of budgets up to the requested one (a plan for less memory is
also a plan for more, so a larger budget is never slower); for very short steps also all plans. The shortest step wins,
and then its points are moved one by one. Effort is counted in evaluations, so the same recording gives the same plan on
any machine.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tests.planning.reference.covers import absence_times, orders_of_leaving_out
from tests.planning.reference.local_search import Choice, Search, every_plan, polish
from vdnn import _C
from vdnn.planning.costs import LinkCosts
from vdnn.planning.gaps import Gap, gaps_of
from vdnn.planning.least_memory import least_bytes
from vdnn.planning.search.step_model import AbsenceTuple, make_step_model
from vdnn.step.recording import Recording

# Evaluations for a step of one point; longer steps get fewer, within the limits below.
_EFFORT = 12_000_000
_MOST_EVALUATIONS, _LEAST_EVALUATIONS = 20_000, 600
_LEAST_SHARE = 0.25  # of the least, for a quick search
_SMALLER_BUDGETS = 12  # the most that are searched, from the least one to the one at which nothing is offloaded
_LONG_STRIDE = 4
# All plans of a step are tried if there are at most this many.
_MOST_TRIED = 4000
# Starts that use only gaps at least this many times as long as their two copies together.
_LENGTHS = (1, 2, 4)


class _Candidate(NamedTuple):
    """The lesser of two candidates is the better one: its step is shorter, or it moves less."""

    step_ns: int
    moved_bytes: int
    absences: Sequence[AbsenceTuple]


def best_moves(recording: Recording, costs: LinkCosts, budget_bytes: int, scale: float) -> Sequence[AbsenceTuple]:
    """The moves under a budget that can be met and is exceeded with everything kept. `scale` of the effort."""
    gaps = gaps_of(recording)
    model = make_step_model(recording, gaps, costs)
    kept_ns, least = recording.kept_ns, least_bytes(recording)
    effort = round(scale * _EFFORT / len(recording.points))
    least_effort = int(_LEAST_EVALUATIONS * min(1.0, max(_LEAST_SHARE, scale)))
    effort = max(least_effort, min(_MOST_EVALUATIONS, effort))
    compute_ns = [point.compute_ns for point in recording.points]
    orders = list(orders_of_leaving_out(compute_ns, gaps, costs))
    starts = list(all_gaps(gaps))

    def covers(smaller_bytes: int) -> list[Choice]:
        return [Choice(model.cover(order, smaller_bytes)) for order in orders]

    def candidate(outcome: _C.StepOutcome) -> _Candidate:
        return _Candidate(outcome.step_ns, _bytes_of(gaps, outcome.absences), outcome.absences)

    at_once = (model.evaluate(one.may_leave, budget_bytes) for one in (starts[0], *covers(budget_bytes)))
    candidates = [candidate(one) for one in at_once if one is not None and one.step_ns <= kept_ns]
    if candidates:
        return min(candidates).absences  # nothing is slowed down, so nothing can be faster
    # A quick search of a long step has fewer evaluations for each budget than starts: it skips some budgets.
    stride = _LONG_STRIDE if effort // (2 * _SMALLER_BUDGETS) < len(starts) + len(orders) else 1
    for smaller_bytes in (*_smaller_budgets(least, recording.peak_bytes, budget_bytes, stride), budget_bytes):
        share = effort // 2 if smaller_bytes == budget_bytes else effort // (2 * _SMALLER_BUDGETS)
        search = Search(model, gaps, smaller_bytes, kept_ns, share)
        found = search.run([*starts, *covers(smaller_bytes)])
        if found is not None:
            candidates.append(candidate(found.outcome))
            starts.append(found.choice)
    for absences in every_plan(gaps, _MOST_TRIED):
        if model.peak_bytes(absences) <= budget_bytes:
            candidates.append(_Candidate(model.replay(absences).step_ns, _bytes_of(gaps, absences), absences))
    best = min(candidates)
    if best.step_ns <= kept_ns:
        return best.absences
    return polish(model, gaps, budget_bytes, best.absences, best.step_ns, effort // 4)[0]


def _bytes_of(gaps: Sequence[Gap], absences: Sequence[AbsenceTuple]) -> int:
    return sum(gaps[gap].nbytes for gap, _, _ in absences)


def _smaller_budgets(least: int, most: int, budget_bytes: int, stride: int) -> Iterator[int]:
    """The budgets below `budget_bytes`, between the least of the step and its most. They do not depend on it."""
    for index in range(0, _SMALLER_BUDGETS, stride):
        smaller_bytes = least + (most - least) * index // _SMALLER_BUDGETS
        if smaller_bytes < budget_bytes:
            yield smaller_bytes


def all_gaps(gaps: Sequence[Gap]) -> Iterator[Choice]:
    """The choices that may use every gap."""
    everything = bytes([1] * len(gaps))
    for in_order, furthest_first in itertools.product((False, True), repeat=2):
        yield Choice(everything, in_order=in_order, furthest_first=furthest_first)


def first_choices(compute_ns: Sequence[int], gaps: Sequence[Gap], costs: LinkCosts) -> Iterator[Choice]:
    """Choices from which a short search begins, with no time for covers. `compute_ns` has the time of every interval
    of the step."""
    yield from all_gaps(gaps)
    lengths = [length / copies for length, copies in absence_times(compute_ns, gaps, costs)]
    for least in _LENGTHS:
        yield Choice(bytes([length >= least for length in lengths]))
