"""plan_step alone holds plans to the budget: it corrects them, takes the shortest candidate that fits, or refuses."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import pytest

from tests.planning.recordings import chain, recomputable
from tests.planning.search.test_use_moments import FAST, SAVE, USE, step_of
from vdnn.errors import BudgetError, VdnnError
from vdnn.planning import planned_step
from vdnn.planning.bound.lower_bound import Bound
from vdnn.planning.costs import LinkCosts
from vdnn.planning.gaps import gaps_of
from vdnn.planning.least_memory import least_bytes
from vdnn.planning.planned_step import plan_step
from vdnn.planning.policies import PlanPolicy, PlanRequest
from vdnn.planning.recomputing import recording_under
from vdnn.planning.search import auto
from vdnn.planning.search.auto import Auto
from vdnn.planning.search.effort import Effort
from vdnn.planning.search.plan_search import make_plan_search
from vdnn.planning.search.step_model import AbsenceTuple, plan_of
from vdnn.step.plan import Plan

# At the use of the first storage, it is reloaded before the second one is released. The third takes the room.
STEP = step_of([(SAVE, 0), (SAVE, 1), (USE, 0), (SAVE, 2), (USE, 2), (USE, 1)], [40, 30, 50])
FIRST, SECOND = (next(place for place, gap in enumerate(gaps_of(STEP)) if gap.lifetime == one) for one in (0, 1))
LATE: tuple[AbsenceTuple, ...] = ((FIRST, 0, -1), (SECOND, 2, -1))  # 70 bytes beside the resident ones at that use
EARLY: tuple[AbsenceTuple, ...] = ((FIRST, 0, -1), (SECOND, 1, -1))
NOTHING: tuple[AbsenceTuple, ...] = ()
KEPT = STEP.peak_bytes


class Fixed(PlanPolicy):
    """Proposes plans with these absences, whatever the budget is."""

    def __init__(
        self, *candidates: Sequence[AbsenceTuple], may_be_corrected: bool = False, name: str = "fixed"
    ) -> None:
        self._candidates = candidates
        self._name = name
        self._may_be_corrected = may_be_corrected
        self.proposed = 0

    @property
    def name(self) -> str:
        return self._name

    @property
    def source(self) -> str:
        return "a test"

    @property
    def may_be_corrected(self) -> bool:
        return self._may_be_corrected

    def plan(self, request: PlanRequest) -> Plan:
        return next(self.candidates(request))

    def candidates(self, request: PlanRequest) -> Iterator[Plan]:
        for absences in self._candidates:
            self.proposed += 1
            yield plan_of(STEP, gaps_of(STEP), absences, self.name, request.budget_bytes)


def test_where_no_plan_of_auto_fits_a_cut_in_two_takes_its_place_under_its_name() -> None:
    budget_bytes = least_bytes(STEP)
    planned = plan_step(STEP, FAST, budget_bytes, Fixed(NOTHING, name="auto"))
    assert planned.timeline.peak_bytes <= budget_bytes < KEPT
    assert planned.plan.policy == "auto"


def test_where_auto_finds_no_plan_the_error_says_what_its_best_one_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planned_step, "PrefixCut", lambda: Fixed(NOTHING))
    with pytest.raises(BudgetError, match="cannot be met") as caught:
        plan_step(STEP, FAST, KEPT - 1, Fixed(NOTHING, name="auto"), must_fit=True)
    assert caught.value.least_bytes == KEPT
    assert caught.value.budget_bytes == KEPT - 1


def test_a_plan_over_the_budget_is_corrected() -> None:
    as_proposed = plan_step(STEP, FAST, None, Fixed(LATE))
    budget_bytes = as_proposed.timeline.peak_bytes
    corrected = Fixed(EARLY).plan(PlanRequest(STEP, FAST, budget_bytes - 1))
    assert as_proposed.plan.lifetimes != corrected.lifetimes
    planned = plan_step(STEP, FAST, budget_bytes - 1, Fixed(LATE, may_be_corrected=True))
    assert planned.plan == corrected
    unchanged = plan_step(STEP, FAST, budget_bytes, Fixed(LATE, may_be_corrected=True))
    assert unchanged.plan.lifetimes == as_proposed.plan.lifetimes


def test_a_plan_that_may_not_be_corrected_is_reported_or_refused() -> None:
    budget_bytes = plan_step(STEP, FAST, None, Fixed(LATE)).timeline.peak_bytes - 1
    planned = plan_step(STEP, FAST, budget_bytes, Fixed(LATE))
    assert not planned.fits
    with pytest.raises(VdnnError, match="policy 'fixed' has no plan under .*'auto' finds one from"):
        plan_step(STEP, FAST, budget_bytes, Fixed(LATE), must_fit=True)


def test_a_plan_that_cannot_be_corrected_is_refused() -> None:
    with pytest.raises(VdnnError, match="policy 'fixed' has no plan under"):
        plan_step(STEP, FAST, KEPT - 1, Fixed(NOTHING, may_be_corrected=True), must_fit=True)


def test_the_shortest_candidate_is_taken_if_it_takes_no_more_memory() -> None:
    slow, short = plan_step(STEP, FAST, None, Fixed(EARLY)), plan_step(STEP, FAST, None, Fixed(NOTHING))
    assert short.timeline.step_ns < slow.timeline.step_ns
    assert plan_step(STEP, FAST, KEPT, Fixed(EARLY, NOTHING)).plan.lifetimes == short.plan.lifetimes
    assert plan_step(STEP, FAST, KEPT - 1, Fixed(EARLY, NOTHING)).plan.lifetimes == slow.plan.lifetimes


def test_no_candidate_is_asked_for_after_one_without_a_stall() -> None:
    policy = Fixed(NOTHING, EARLY)
    assert plan_step(STEP, FAST, KEPT, policy).timeline.step_ns == STEP.compute_ns
    assert policy.proposed == 1


class Sorted(Fixed):
    def are_sorted(self, request: PlanRequest) -> bool:
        return True


def test_of_sorted_candidates_none_is_asked_for_after_one_that_fits_as_it_is() -> None:
    policy = Sorted(EARLY, LATE)
    planned = plan_step(STEP, FAST, plan_step(STEP, FAST, None, Fixed(EARLY)).timeline.peak_bytes, policy)
    assert planned.timeline.step_ns > STEP.compute_ns, "it would ask for the next one"
    assert policy.proposed == 1
    corrected = Sorted(LATE, EARLY, may_be_corrected=True)
    plan_step(STEP, FAST, planned.timeline.peak_bytes, corrected)
    assert corrected.proposed == 2, "the next one may be shorter than what was corrected"


class MovesAlone:
    """A search that chooses no recomputes."""

    def __init__(self, request: PlanRequest, effort: Effort, known: Collection[int] = ()) -> None:
        self._search = make_plan_search(request, effort, known)
        self.moves = self._search.moves

    def all(self) -> list[tuple[int, list[int], list[AbsenceTuple]]]:
        moves = self._search.moves([])
        return [] if moves is None else [(0, [], moves)]


def test_a_certified_plan_tries_the_recomputes_that_the_bound_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search of recomputes is kept from finding any, so that the plan only moves."""
    recording = recomputable(chain([100, 100, 200]), 1, (), compute_ns=1)
    slow = LinkCosts(1e7, 1e7, 2e7, 0)
    budget_bytes = recording.peak_bytes - 100
    monkeypatch.setattr(auto, "make_plan_search", MovesAlone)
    moved = plan_step(recording, slow, budget_bytes, certify=True)
    assert moved.plan.offloaded_bytes
    bound = Bound(recording.compute_ns, is_whole=False, recomputes=frozenset({1}))
    monkeypatch.setattr(planned_step, "lower_bound", lambda *_, **__: bound)
    tried = plan_step(recording, slow, budget_bytes, certify=True)
    assert tried.plan.lifetimes[1].is_recomputed
    assert tried.timeline.step_ns == recording.compute_ns + 1 < moved.timeline.step_ns
    # A recompute that needs more memory than there is cannot be planned.
    larger = recomputable(chain([100, 100, 200]), 1, (), compute_ns=1, extra=400)
    kept = plan_step(larger, slow, least_bytes(larger), certify=True)
    assert kept.fits
    assert not kept.plan.lifetimes[1].is_recomputed


def test_the_steps_beside_the_candidates_of_auto_are_those_with_their_recomputes() -> None:
    """plan_step() simulates plans on them."""
    recording = recomputable(recomputable(chain([100] * 12), 4, (3,), 10), 7, (6,), 10)
    budget_bytes = (least_bytes(recording) + recording.peak_bytes) // 2
    beside = list(Auto().followed_candidates(PlanRequest(recording, LinkCosts(1e7, 1e7, 2e7, 0), budget_bytes)))
    assert any(one.is_recomputed for plan, _ in beside for one in plan.lifetimes)
    assert [followed for _, followed in beside] == [recording_under(recording, plan.lifetimes) for plan, _ in beside]
