"""The native search finds the same moves and recomputes as its readable form, with the same random draws."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings, strategies

from tests.drawn import examples
from tests.planning.recordings import LINKS, any_recomputable_recording, chain, recomputable
from tests.planning.reference.local_search import Choice, Search
from tests.planning.reference.move_search import best_moves, first_choices
from tests.planning.reference.recompute_choice import RecomputeChoice
from vdnn import _C
from vdnn.errors import InvalidArgumentError
from vdnn.planning.costs import LinkCosts
from vdnn.planning.gaps import gaps_of
from vdnn.planning.least_memory import least_bytes
from vdnn.planning.policies import PlanRequest
from vdnn.planning.recomputing import with_recomputes
from vdnn.planning.search.effort import FULL, NEARBY, QUICK, Effort
from vdnn.planning.search.plan_search import make_plan_search
from vdnn.planning.search.step_model import make_step_model
from vdnn.step.recording import Recording

_LINK = LinkCosts(1e9, 2e9, 2.5e9, 3)


def long_step(seed: int, count: int, *, has_host: bool) -> Recording:
    """A step of `count` storages, of which many can be recomputed from earlier ones."""
    draw = random.Random(seed)
    recording = chain([draw.randint(1, 200) for _ in range(count)], compute_ns=60)
    for index in range(1, count):
        if draw.random() < 0.7:
            inputs = tuple(sorted({draw.randrange(index) for _ in range(draw.randint(0, 2))}))
            recording = recomputable(recording, index, inputs, draw.randint(1, 150), draw.randint(0, 30))
    if has_host:
        points = tuple(replace(point, issue_ns=draw.randint(0, 90)) for point in recording.points)
        recording = replace(recording, points=points)
    return recording


def require_equal_searches(request: PlanRequest, effort: Effort, known: Sequence[int] = ()) -> _C.PlanSearch:
    """Compares all that a plan is made of."""
    recording, costs, budget_bytes = request
    assert budget_bytes is not None
    search = make_plan_search(request, effort, known)
    assert search.moves([]) == list(best_moves(recording, costs, budget_bytes, effort.moves))
    chosen = [sorted(trial.chosen) for trial in RecomputeChoice(request, effort, known).best(effort.finalists)]
    assert search.recomputes() == chosen
    for one in chosen[: effort.finalists]:
        followed = with_recomputes(recording, one)
        if least_bytes(followed) > budget_bytes:
            assert search.moves(one) is None
        elif followed.peak_bytes <= budget_bytes:
            assert search.moves(one) == []
        else:
            assert search.moves(one) == list(best_moves(followed, costs, budget_bytes, effort.moves))
    return search


@settings(max_examples=examples(60), deadline=None)
@given(recording=any_recomputable_recording(5), costs=LINKS, data=strategies.data())
def test_short_steps_are_searched_like_the_reference(
    recording: Recording, costs: LinkCosts, data: strategies.DataObject
) -> None:
    assume(least_bytes(recording) < recording.peak_bytes)
    budget_bytes = data.draw(strategies.integers(least_bytes(recording), recording.peak_bytes - 1))
    require_equal_searches(PlanRequest(recording, costs, budget_bytes), QUICK)


@pytest.mark.parametrize("share", [0.02, 0.3, 0.7])
@pytest.mark.parametrize(("seed", "has_host"), [(0, False), (1, True), (2, False), (3, True)])
def test_long_steps_are_searched_like_the_reference(seed: int, share: float, has_host: bool) -> None:
    """A sample of few is drawn from those that are left, one of many anew until it is another one: both occur."""
    recording = long_step(seed, 30 if seed < 2 else 90, has_host=has_host)
    least, most = least_bytes(recording), recording.peak_bytes
    costs = replace(_LINK, issue_ns=25) if has_host else _LINK
    request = PlanRequest(recording, costs, round(least + share * (most - least)))
    search = require_equal_searches(request, QUICK)
    before = search.evaluations
    search.recomputes()
    assert before > 0
    assert search.evaluations > before


def test_a_known_choice_is_tried_first() -> None:
    recording = long_step(3, 60, has_host=False)
    least, most = least_bytes(recording), recording.peak_bytes
    request = PlanRequest(recording, _LINK, (least + most) // 2)
    recipes = [index for index, one in enumerate(recording.lifetimes) if one.recompute is not None]
    known = recipes[::3]
    all_tried = NEARBY._replace(finalists=1000)
    assert known not in make_plan_search(request, all_tried).recomputes()
    assert known in make_plan_search(request, all_tried, known).recomputes()
    require_equal_searches(request, NEARBY, known)
    with_strangers = [*known, next(one for one in range(len(recording.lifetimes)) if one not in recipes)]
    assert known in make_plan_search(request, all_tried, with_strangers).recomputes()


def test_a_quick_search_of_a_long_step_skips_some_budgets() -> None:
    """Its 150 evaluations, the fewest of a quick search, would be taken by the starts of all budgets."""
    recording = long_step(7, 1500, has_host=False)
    least, most = least_bytes(recording), recording.peak_bytes
    request = PlanRequest(recording, _LINK, least + (most - least) // 4)  # above three of the twelve smaller ones
    quick = make_plan_search(request, QUICK)
    assert quick.moves([]) == list(best_moves(*request, QUICK.moves))
    starts = 4 + 13  # choices with all gaps, and covers
    assert 100 < quick.evaluations <= 1 + 13 + starts + 150 // 2 + 150 // 4, (
        "at once, at one smaller budget, at the budget, moved"
    )


def test_a_full_search_is_that_of_the_reference() -> None:
    recording = long_step(5, 24, has_host=False)
    budget_bytes = (least_bytes(recording) + recording.peak_bytes) // 2
    require_equal_searches(PlanRequest(recording, _LINK, budget_bytes), FULL)


@pytest.mark.parametrize("seed", range(6))
def test_a_local_search_is_that_of_the_reference(seed: int) -> None:
    """With one start and with all, for many evaluations and for few."""
    recording = long_step(seed, 40, has_host=seed % 2 == 0)
    gaps = gaps_of(recording)
    model = make_step_model(recording, gaps, replace(_LINK, issue_ns=10 * (seed % 2)))
    budget_bytes = (least_bytes(recording) + 2 * recording.peak_bytes) // 3
    compute_ns = [point.compute_ns for point in recording.points]
    starts = list(first_choices(compute_ns, gaps, _LINK))
    tuples = [(one.may_leave, one.in_order, one.furthest_first) for one in starts]
    assert _C.first_choices(model) == tuples
    for effort in (1, 12, 400):
        for count in (1, len(starts)):
            expected = Search(model, gaps, budget_bytes, recording.kept_ns, effort).run(starts[:count])
            found = _C.local_search(
                model=model,
                budget_bytes=budget_bytes,
                kept_ns=recording.kept_ns,
                effort=effort,
                starts=tuples[:count],
            )
            assert expected is not None
            assert found is not None
            assert (found.step_ns, found.absences) == (expected.step_ns, expected.outcome.absences)


def test_a_search_under_a_budget_that_no_choice_meets_finds_nothing() -> None:
    recording = chain([10, 20, 30])
    search = make_plan_search(PlanRequest(recording, _LINK, least_bytes(recording) - 1), QUICK)
    assert search.moves([]) is None
    model = make_step_model(recording, gaps_of(recording), _LINK)
    everything = Choice(bytes([1] * len(gaps_of(recording))))
    found = _C.local_search(
        model=model, budget_bytes=1, kept_ns=0, effort=9, starts=[(everything.may_leave, False, False)]
    )
    assert found is None


def test_candidates_that_cannot_be_recomputed_are_refused() -> None:
    recording = recomputable(chain([10, 20, 30]), 1, (), 5)
    search = make_plan_search(PlanRequest(recording, _LINK, recording.peak_bytes - 1), QUICK)
    with pytest.raises(InvalidArgumentError, match="chosen"):
        search.moves([0])
