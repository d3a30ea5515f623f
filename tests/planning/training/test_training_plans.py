"""Plans of whole trainings: as good as the exhaustive optimum, never below the bound, never slower with more."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import pytest

from tests.drawn import quick_and_full
from tests.planning.training.random_trainings import RandomTraining, random_training
from tests.planning.training.test_training_cycles import GB, machine, unit
from vdnn.errors import BudgetError, InvalidArgumentError
from vdnn.planning.training import auto_placement as searches
from vdnn.planning.training.auto_placement import auto_placement
from vdnn.planning.training.cycle import cycle_of
from vdnn.planning.training.placement import EXACT, Allowed, Placement, State, unit_choices
from vdnn.planning.training.simulate_cycle import TrainingStep, simulate_training
from vdnn.planning.training.training import Training
from vdnn.planning.training.training_bound import relaxations, training_bound

# The share of steps that may be longer than the best where the placements are searched and not tried through.
_MOST_MISSED = 0.05

FREE = Allowed(cpu_steps=True, deferred=True, in_backward=True)


def planned(case: RandomTraining) -> TrainingStep | None:
    try:
        return auto_placement(case.training, case.machine, case.budget_bytes, case.allowed)
    except (BudgetError, InvalidArgumentError):
        return None


@quick_and_full("count", 12, 40)
def test_no_plan_is_below_its_bound(count: int) -> None:
    found = 0
    for seed in range(count):
        case = random_training(seed, 2)
        step = planned(case)
        if step is not None:
            found += 1
            bound_ns = training_bound(case.training, case.machine, case.budget_bytes, case.allowed)
            assert bound_ns <= step.step_ns, seed
    assert found > count // 2


def search_misses(monkeypatch: pytest.MonkeyPatch, seeds: range) -> int:
    """How many trainings the search plans with a longer step than trying all placements does."""
    best = {seed: planned(random_training(seed, 2)) for seed in seeds}
    monkeypatch.setattr(searches, "_TRIED_THROUGH", 0)
    missed = 0
    for seed, one in best.items():
        step = planned(random_training(seed, 2))
        if one is not None:
            assert step is not None, seed
            missed += step.step_ns > one.step_ns * 1.0001
    return missed


@quick_and_full("seeds", range(100, 105), range(1000, 2000))
def test_the_search_finds_what_trying_all_placements_finds(monkeypatch: pytest.MonkeyPatch, seeds: range) -> None:
    assert search_misses(monkeypatch, seeds) <= _MOST_MISSED * len(seeds)


def test_an_estimate_is_never_longer_than_the_simulated_step() -> None:
    for seed in range(300, 306):
        case = random_training(seed, 2)
        for relaxed in relaxations(case.training, case.machine, case.budget_bytes, case.allowed):
            for units in itertools.product(
                unit_choices(case.training, 0, case.allowed)[::3], unit_choices(case.training, 1, case.allowed)[::5]
            ):
                placement = Placement(units, relaxed.step_time)
                cycle = cycle_of(case.training, placement)
                over, least_s = relaxed.estimate.of(units)
                fits = max(cycle.needed_bytes) <= case.budget_bytes and cycle.host_bytes <= case.machine.host_bytes
                if fits:
                    step = simulate_training(case.training, case.machine, placement, case.budget_bytes)
                    assert over <= 1e-6
                    assert least_s * 1e9 <= step.step_ns * (1 + 1e-6)


@pytest.mark.parametrize("seed", [200, 201, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(202, 206))])
def test_more_memory_is_never_slower(seed: int) -> None:
    case = random_training(seed, 2)
    times = []
    for factor in (1.0, 1.2, 1.5, 2.0):
        step = planned(case._replace(budget_bytes=int(case.budget_bytes * factor)))
        if step is not None:
            times.append(step.step_ns)
    # Room changes when copies begin, and by that a little of what they share.
    assert all(later <= earlier * 1.02 for earlier, later in itertools.pairwise(times))


def test_a_step_on_the_cpu_is_planned_only_if_it_is_allowed() -> None:
    training = Training("a unit with much state", (unit("a", step_ns=0), unit("b", step_ns=0)))
    on = machine(cpu_bytes_per_s=1e12)
    budget_bytes = 10 * GB
    exact = auto_placement(training, on, budget_bytes)
    assert all(one.state is not State.CPU for one in exact.placement.units)
    allowed = auto_placement(training, on, budget_bytes, Allowed(cpu_steps=True))
    assert allowed.step_ns < exact.step_ns
    assert any(one.state is State.CPU for one in allowed.placement.units)


@pytest.mark.slow
@quick_and_full("count", 6, 40)
def test_a_plan_with_freedoms_is_never_slower_than_the_exact_one(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(searches, "_TRIED_THROUGH", 0)
    # So that the search stops early, as it does in large trainings.
    monkeypatch.setattr(searches, "_WORK", 60 if count > 6 else 20)
    tried = 0
    for seed in range(count):
        case = random_training(seed, 3 if count > 6 else 2)
        exact, free = planned(case._replace(allowed=EXACT)), planned(case._replace(allowed=FREE))
        if exact is not None and free is not None:
            tried += 1
            assert free.step_ns <= exact.step_ns, seed
    assert tried > count // 2


def test_too_little_memory_is_refused_with_the_least() -> None:
    training = Training("a unit", (unit("a"),))
    with pytest.raises(BudgetError) as refused:
        auto_placement(training, machine(), GB)
    assert auto_placement(training, machine(), refused.value.least_bytes).peak_bytes <= refused.value.least_bytes


def test_a_host_that_is_too_small_is_refused_with_both_numbers() -> None:
    training = Training("a unit", (unit("a"), unit("b")))
    small = replace(machine(), host_bytes=GB)
    with pytest.raises(InvalidArgumentError, match=r"^host: expected at least .* got 953.67 MiB") as refused:
        auto_placement(training, small, 12 * GB)
    needed_bytes = int(re.findall(r"\((\d+) bytes\)", str(refused.value))[0])
    enough = replace(small, host_bytes=needed_bytes)
    assert auto_placement(training, enough, 12 * GB).host_bytes <= needed_bytes
