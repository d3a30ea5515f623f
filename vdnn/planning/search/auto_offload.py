"""auto-offload: offloads storages so that the step stays under the budget with the least slowdown. vdnn's own policy.

A portfolio: local search from several starts, on a ladder of budgets up to the requested one (a plan for less memory is
also a plan for more, so a larger budget is never slower); the plans of simpler policies; for very short steps all
plans. The shortest step wins, and then its points are moved one by one. Effort is counted in evaluations, so the same
recording gives the same plan on any machine.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from vdnn import _C
from vdnn.planning.costs import LinkCosts
from vdnn.planning.gaps import Gap, gaps_of
from vdnn.planning.least_memory import least_bytes, require_feasible_budget
from vdnn.planning.policies.plan_policy import PlanPolicy, PlanRequest
from vdnn.planning.policies.vdnn_all import VdnnAllPlan
from vdnn.planning.policies.vdnn_conv import VdnnConvPlan
from vdnn.planning.search.local_search import Choice, Search, every_plan, polish
from vdnn.planning.search.prefix_cut import PrefixCut
from vdnn.planning.search.step_model import AbsenceTuple, make_step_model, plan_of, tuples_of_plan
from vdnn.step.plan import Plan

# Evaluations for a step of one point; longer steps get fewer, within the limits below.
_EFFORT = 12_000_000
_MOST_EVALUATIONS, _LEAST_EVALUATIONS = 20_000, 600
_RUNGS = 12  # of the ladder, from the least budget to the one at which nothing has to be offloaded
# Simple policies of ours and of the vDNN paper. Each gives the search another start. They are skipped for long steps,
# where some take longer than the search.
_SIMPLE: tuple[Callable[[], PlanPolicy], ...] = (PrefixCut, VdnnConvPlan, VdnnAllPlan)
_MOST_GAPS_OF_SIMPLE = 1000
# All plans of a step are tried if there are at most this many.
_MOST_TRIED = 4000
# Starts that use only gaps at least this many times as long as their two copies together.
_LENGTHS = (1, 2, 4)


@dataclass(frozen=True, slots=True)
class _Candidate:
    step_ns: int
    absences: Sequence[AbsenceTuple]


class AutoOffload(PlanPolicy):
    """Keeps or offloads, never recomputes. `effort` scales how long the search takes. `asks_others`: also try the plans
    of simpler policies."""

    def __init__(self, effort: float = 1.0, *, asks_others: bool = True) -> None:
        self._effort = effort
        self._asks_others = asks_others

    @property
    def name(self) -> str:
        return "auto-offload"

    @property
    def source(self) -> str:
        return "vdnn"

    @property
    def may_be_corrected(self) -> bool:
        return True

    def plan(self, request: PlanRequest) -> Plan:
        recording, budget_bytes = request.recording, request.budget_bytes
        if budget_bytes is None or recording.peak_bytes <= budget_bytes:
            return plan_of(recording, (), (), self.name, budget_bytes)
        require_feasible_budget(recording, budget_bytes)
        gaps = gaps_of(recording)
        model = make_step_model(recording, gaps, request.costs)
        best = self._best(request, budget_bytes, gaps, model)
        return plan_of(recording, gaps, best.absences, self.name, budget_bytes)

    def _best(self, request: PlanRequest, budget_bytes: int, gaps: Sequence[Gap], model: _C.StepModel) -> _Candidate:
        recording = request.recording
        effort = round(self._effort * _EFFORT / len(recording.points))
        effort = max(_LEAST_EVALUATIONS, min(_MOST_EVALUATIONS, effort))
        candidates = []
        for policy in _SIMPLE if self._asks_others and len(gaps) <= _MOST_GAPS_OF_SIMPLE else ():
            absences = tuples_of_plan(gaps, policy().plan(request))
            if model.peak_bytes(absences) <= budget_bytes:
                candidates.append(_Candidate(model.replay(absences).step_ns, absences))
                if candidates[-1].step_ns <= recording.compute_ns:
                    return candidates[-1]
        starts = list(first_choices([point.compute_ns for point in recording.points], gaps, request.costs))
        starts += [Choice(_flags(gaps, candidate)) for candidate in candidates]
        for rung_bytes in (*_ladder(request, budget_bytes), budget_bytes):
            share = effort // 2 if rung_bytes == budget_bytes else effort // (2 * _RUNGS)
            search = Search(model, gaps, rung_bytes, recording.compute_ns, share)
            found = search.run(starts)
            if found is not None:
                candidates.append(_Candidate(found.step_ns, found.outcome.absences))
                starts.append(found.choice)
        for absences in every_plan(gaps, _MOST_TRIED):
            if model.peak_bytes(absences) <= budget_bytes:
                candidates.append(_Candidate(model.replay(absences).step_ns, absences))
        best = min(candidates, key=lambda one: one.step_ns)
        if best.step_ns > recording.compute_ns:
            absences, step_ns = polish(model, gaps, budget_bytes, best.absences, best.step_ns, effort // 4)
            best = _Candidate(step_ns, absences)
        return best


def _flags(gaps: Sequence[Gap], candidate: _Candidate) -> bytes:
    flags = bytearray(len(gaps))
    for gap, _, _ in candidate.absences:
        flags[gap] = 1
    return bytes(flags)


def _ladder(request: PlanRequest, budget_bytes: int) -> Iterator[int]:
    """The rungs below the budget. The rungs themselves do not depend on the budget."""
    least, most = least_bytes(request.recording), request.recording.peak_bytes
    for rung in range(_RUNGS):
        rung_bytes = least + (most - least) * rung // _RUNGS
        if rung_bytes < budget_bytes:
            yield rung_bytes


def first_choices(compute_ns: Sequence[int], gaps: Sequence[Gap], costs: LinkCosts) -> Iterator[Choice]:
    """Choices from which a search begins. `compute_ns` has the time of every interval of the step."""
    everything = bytes([1] * len(gaps))
    yield Choice(everything)
    yield Choice(everything, in_order=True)
    yield Choice(everything, furthest_first=True)
    yield Choice(everything, in_order=True, furthest_first=True)
    reached = [0, *itertools.accumulate(compute_ns)]
    copies_ns = 1e9 / costs.to_host_bytes_per_s + 1e9 / costs.to_device_bytes_per_s  # of one byte, both ways
    lengths = [(reached[gap.last + 1] - reached[gap.release_point + 1]) / (gap.nbytes * copies_ns) for gap in gaps]
    for least in _LENGTHS:
        yield Choice(bytes([length >= least for length in lengths]))
