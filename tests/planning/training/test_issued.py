"""A whole training is no faster than its host issues it, and its search and its bound know that."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.planning.training.random_trainings import RandomTraining, random_training
from vdnn.errors import BudgetError, InvalidArgumentError
from vdnn.planning.training.auto_placement import auto_placement
from vdnn.planning.training.cycle import cycle_of
from vdnn.planning.training.issued import issued_ns
from vdnn.planning.training.native_cycle import native_cycle_of, step_ns_of
from vdnn.planning.training.placement import Activations, State, StepTime, UnitPlacement, all_alike
from vdnn.planning.training.simulate_cycle import simulate_training
from vdnn.planning.training.training import Training
from vdnn.planning.training.training_bound import training_bound


def with_host(training: Training, times: int) -> Training:
    """The training on a host that needs 1, 2 and 3 us times `times` for forward, backward and step of each unit."""
    units = tuple(
        replace(unit, forward_issue_ns=1000 * times, backward_issue_ns=2000 * times, step_issue_ns=3000 * times)
        for unit in training.units
    )
    return replace(training, units=units)


def slowed(one: RandomTraining, times: int) -> RandomTraining:
    machine = replace(one.machine, link=replace(one.machine.link, issue_ns=500 * times))
    return one._replace(training=with_host(one.training, times), machine=machine)


def test_each_copy_and_each_recompute_has_to_be_issued() -> None:
    one = slowed(random_training(3, 4), 1)
    training, passes = one.training, one.training.micro_batches
    stepped = sum(1 for unit in training.units if unit.gradient_bytes)
    kept = all_alike(training, UnitPlacement())
    assert issued_ns(training, one.machine, kept, 0) == training.issue_ns == passes * 4 * 3000 + stepped * 3000
    assert issued_ns(training, one.machine, kept, 7) == training.issue_ns + 7 * 500
    again = all_alike(training, UnitPlacement(Activations.RECOMPUTE))
    assert issued_ns(training, one.machine, again, 0) == training.issue_ns + passes * 4 * 1000
    on_cpu = replace(all_alike(training, UnitPlacement(gradient_leaves=True, state=State.CPU)), step_time=StepTime.END)
    assert issued_ns(training, one.machine, on_cpu, 0) == training.issue_ns - stepped * 3000
    assert issued_ns(with_host(training, 0), one.machine, kept, 7) == 0, "nothing is known of the host"


@pytest.mark.parametrize("seed", range(8))
def test_a_step_takes_the_longer_of_device_and_host(seed: int) -> None:
    one = random_training(seed, 4)
    placement = all_alike(one.training, UnitPlacement(Activations.OFFLOAD, True, True, State.HOST))
    alone = simulate_training(one.training, one.machine, placement, one.budget_bytes)
    for times in (1, 1_000, 30_000):
        slow = slowed(one, times)
        cycle = cycle_of(slow.training, placement)
        host_ns = issued_ns(slow.training, slow.machine, placement, len(cycle.outs) + len(cycle.ins))
        step = simulate_training(slow.training, slow.machine, placement, one.budget_bytes)
        native_ns = step_ns_of(slow.training, slow.machine, placement, native_cycle_of(cycle), one.budget_bytes)
        assert step.step_ns == native_ns == max(alone.step_ns, host_ns)
        assert step.issue_ns == host_ns


@pytest.mark.parametrize("seed", range(6))
def test_the_plan_for_a_slow_host_is_never_slower_there_and_above_its_bound(seed: int) -> None:
    one = random_training(seed, 3)
    try:
        without = auto_placement(one.training, one.machine, one.budget_bytes, one.allowed)
    except (BudgetError, InvalidArgumentError):
        return
    slow = slowed(one, 8_000)
    there = simulate_training(slow.training, slow.machine, without.placement, one.budget_bytes)
    found = auto_placement(slow.training, slow.machine, one.budget_bytes, one.allowed, (without.placement,))
    assert found.step_ns <= there.step_ns
    pytest.importorskip("scipy")
    bound_ns = training_bound(slow.training, slow.machine, one.budget_bytes, slow.allowed)
    assert bound_ns <= found.step_ns
    stepped = 0 if slow.allowed.cpu_steps else sum(u.step_issue_ns for u in slow.training.units if u.gradient_bytes)
    assert bound_ns >= slow.training.issue_ns - sum(u.step_issue_ns for u in slow.training.units) + stepped
