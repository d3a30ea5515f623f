"""Plans of whole trainings, executed as programs of streams and events, do what their simulation says."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from benchmarks.whole_state.cells import FREE, SHARES, tokens_of
from benchmarks.whole_state.decoders import MODELS, training_of
from benchmarks.whole_state.executed_placement import execute_training
from benchmarks.whole_state.machines import MACHINES
from tests.planning.training.random_trainings import random_training
from tests.planning.training.test_native_cycles import random_placement
from vdnn.planning.published.whole_state import WHOLE_STATE_POLICIES
from vdnn.planning.training.auto_placement import auto_placement
from vdnn.planning.training.cycle import cycle_of
from vdnn.planning.training.simulate_cycle import TrainingStep, simulate_training


def outcome_of(step: TrainingStep) -> tuple[int, int, int, int]:
    return step.step_ns, step.peak_bytes, step.to_device_bytes, step.to_host_bytes


def test_random_placements_run_as_simulated() -> None:
    slower = 0
    for seed in range(150):
        case, draw = random_training(seed, 5), random.Random(seed)
        placement = random_placement(case, draw)
        budget_bytes = max(*cycle_of(case.training, placement).needed_bytes, case.budget_bytes)
        step = simulate_training(case.training, case.machine, placement, budget_bytes)
        executed = execute_training(case.training, case.machine, placement, budget_bytes)
        assert executed.outcome == outcome_of(step), seed
        assert executed.cpu_step_bytes == step.cpu_step_bytes, seed
        slower += step.slowdown > 1.01
    assert slower > 75  # most of them wait for copies


@pytest.mark.slow
def test_a_plan_of_a_decoder_and_the_published_ones_run_as_simulated() -> None:
    model, machine = MODELS[1], MACHINES[0]
    training = training_of(model, machine, tokens_of(model))
    budget_bytes = int(machine.card_bytes * SHARES[2])
    on = machine.training_machine
    placements = [policy.place(training, on, budget_bytes) for policy in WHOLE_STATE_POLICIES]
    placements.append(auto_placement(training, on, budget_bytes, FREE).placement)
    found = [placement for placement in placements if placement is not None]
    assert len(found) > 3
    for placement in found:
        step = simulate_training(training, on, placement, budget_bytes)
        assert execute_training(training, on, placement, budget_bytes).outcome == outcome_of(step)


def test_a_plan_keeps_its_time_under_a_larger_budget() -> None:
    changed = 0
    for seed in range(30):
        case, draw = random_training(seed, 4), random.Random(seed)
        placement = random_placement(case, draw)
        least_bytes = max(cycle_of(case.training, placement).needed_bytes)
        with_room = replace(placement, room_bytes=least_bytes)
        small, large, filled = (
            simulate_training(case.training, case.machine, one, budget_bytes)
            for one, budget_bytes in (
                (placement, least_bytes),
                (with_room, 2 * least_bytes),
                (placement, 2 * least_bytes),
            )
        )
        assert outcome_of(small) == outcome_of(large), seed
        changed += filled.step_ns != small.step_ns
    assert changed > 10
