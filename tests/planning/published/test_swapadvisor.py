"""swapadvisor: Belady's order of eviction, and a search that is never worse than Belady's rule."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.drawn import examples
from tests.planning.policies.steps import EVEN, absences_of, made_plan, used_twice, wild_recording
from tests.planning.recordings import LINKS, chain
from vdnn.planning.costs import LinkCosts
from vdnn.planning.footprint import interval_bytes
from vdnn.planning.gaps import gaps_of, planned_lifetimes
from vdnn.planning.least_memory import least_bytes
from vdnn.planning.published.swapadvisor import SwapAdvisor, belady, changed, crossed
from vdnn.planning.simulate import simulate
from vdnn.step.plan import Absence, make_plan
from vdnn.step.recording import Recording


def belady_absences(recording: Recording, budget_bytes: int, *kept: int) -> dict[int, tuple[Absence, ...]] | None:
    gaps = gaps_of(recording)
    absences = belady(recording, gaps, [gap.lifetime not in kept for gap in gaps], budget_bytes)
    if absences is None:
        return None
    return absences_of(make_plan(recording, "belady", planned_lifetimes(recording, absences), budget_bytes))


def step_ns(recording: Recording, planner: SwapAdvisor, budget_bytes: int, costs: LinkCosts) -> int:
    return simulate(recording, made_plan(planner, recording, budget_bytes, costs), costs).step_ns


def test_what_is_used_last_of_all_leaves_when_room_is_needed_and_not_before() -> None:
    # All four are on the device before points 3, 4 and 5, because the storage used at 4 is held until 5.
    assert belady_absences(chain([10, 10, 10, 10]), chain([10, 10, 10, 10]).peak_bytes - 1) == {0: (Absence(2, 5),)}


def test_what_is_soon_used_again_does_not_leave() -> None:
    recording = used_twice([10, 10, 10, 10])  # the first is used next, so now the second is used last
    absences = belady_absences(recording, recording.peak_bytes - 1)
    assert absences is not None
    assert absences[1] == (Absence(2, 6),)
    assert all(absence.release_point >= 4 for absence in absences.get(0, ()))


def test_what_may_not_leave_stays() -> None:
    recording = chain([10, 10, 10, 10])
    assert belady_absences(recording, recording.peak_bytes - 1, 0) == {1: (Absence(2, 5),)}
    assert belady_absences(recording, recording.peak_bytes - 1, 0, 1, 2, 3) is None


def test_more_evaluations_are_not_slower() -> None:
    recording = chain([10, 40, 20, 10, 40, 40, 80, 40, 40, 10], compute_ns=10)
    budget = least_bytes(recording) + 80
    steps = [step_ns(recording, SwapAdvisor(evaluations=count), budget, EVEN) for count in (1, 20, 100, 300)]
    assert steps == sorted(steps, reverse=True)
    assert steps[-1] < steps[1] < steps[0], "the search found nothing"


def test_the_first_evaluation_is_belady() -> None:
    recording = chain([50, 20, 40, 10, 30, 25], compute_ns=30)
    budget = least_bytes(recording) + 30
    plan = made_plan(SwapAdvisor(evaluations=1), recording, budget)
    assert absences_of(plan) == belady_absences(recording, budget)


def test_a_seed_makes_the_plan() -> None:
    recording = chain([10, 40, 20, 10, 40, 40, 80, 40, 40, 10], compute_ns=10)
    budget = least_bytes(recording) + 80
    plans = {seed: made_plan(SwapAdvisor(seed=seed, evaluations=20), recording, budget) for seed in range(6)}
    assert plans == {seed: made_plan(SwapAdvisor(seed=seed, evaluations=20), recording, budget) for seed in range(6)}
    assert len({plan.lifetimes for plan in plans.values()}) > 1


def test_a_child_is_its_mother_up_to_some_place_and_its_father_from_there() -> None:
    children = {crossed(bytes(4), bytes([1] * 4), random.Random(seed)) for seed in range(50)}
    assert children == {bytes([0] * place + [1] * (4 - place)) for place in range(5)}


def test_about_one_gene_of_a_child_is_changed() -> None:
    draw = random.Random(0)
    changes = [sum(changed(bytes(50), draw)) for _ in range(400)]
    assert {0, 1, 2} <= set(changes)
    assert 0.8 < sum(changes) / len(changes) < 1.2
    assert set(changed(bytes([1] * 50), draw)) == {0, 1}


@settings(max_examples=examples(50), deadline=None)
@given(recording=wild_recording(), costs=LINKS, share=st.floats(0, 1))
def test_it_is_never_slower_than_belady_nor_over_the_budget(
    recording: Recording, costs: LinkCosts, share: float
) -> None:
    least = least_bytes(recording)
    budget = least + round(share * (recording.peak_bytes - least))
    gaps = gaps_of(recording)
    absences = belady(recording, gaps, [True] * len(gaps), budget)
    assert absences is not None
    plan = make_plan(recording, "belady", planned_lifetimes(recording, absences), budget)
    assert max(interval_bytes(recording, plan.lifetimes)) <= budget
    assert step_ns(recording, SwapAdvisor(evaluations=30), budget, costs) <= simulate(recording, plan, costs).step_ns
