"""The native simulation of a whole training equals the readable one, to the nanosecond and the byte."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tests.planning.reference.training_cycle import simulated_cycle
from tests.planning.training.random_trainings import RandomTraining, random_training
from vdnn import _C
from vdnn.errors import InvalidArgumentError
from vdnn.planning.training.cycle import cycle_of
from vdnn.planning.training.cycle_parts import CycleParts
from vdnn.planning.training.native_cycle import native_cycle_of, step_ns_of
from vdnn.planning.training.placement import Allowed, Placement, State, unit_choices
from vdnn.planning.training.simulate_cycle import cycle_with_room, simulate_training

_FREE = Allowed(cpu_steps=True, deferred=True, in_backward=True)


def random_placement(case: RandomTraining, draw: random.Random) -> Placement:
    training = case.training
    return Placement(
        tuple(draw.choice(unit_choices(training, index, _FREE)) for index in range(len(training.units))),
        draw.choice(_FREE.step_times(training)),
        slice_bytes=draw.choice([8 << 20, 1 << 30]),
        overlap=draw.choice([1, 2, 4]),
        room_share_of_steps=draw.choice([0.0, 0.5, 1.0]),
        room_share_of_passes=draw.choice([0.0, 0.5, 1.0]),
        forward_waits_for_steps=draw.random() < 0.2,
        delayed_update=draw.random() < 0.2,
    )


def test_both_simulations_agree_in_time_memory_and_spans() -> None:
    slower = 0
    for seed in range(120):
        case, draw = random_training(seed, 5), random.Random(seed)
        placement = random_placement(case, draw)
        budget_bytes = max(*cycle_of(case.training, placement).needed_bytes, case.budget_bytes)
        step = simulate_training(case.training, case.machine, placement, budget_bytes, with_spans=True)
        reference = simulated_cycle(case.training, case.machine, placement, budget_bytes)
        assert step.step_ns == max(round(reference.step_ns), step.issue_ns), seed
        assert list(step.held) == reference.held, seed
        assert list(step.spans) == reference.spans, seed
        cycle = cycle_with_room(case.training, case.machine, placement, budget_bytes)
        assert [(one.nbytes, one.task, one.bound) for one in cycle.outs] == reference.outs, seed
        assert [(one.nbytes, one.task, one.bound) for one in cycle.ins] == reference.ins, seed
        slower += step.slowdown > 1.01
    assert slower > 60  # most of them wait for copies


def test_a_cycle_is_simulated_twice_with_the_same_result() -> None:
    case = random_training(1, 4)
    placement = random_placement(case, random.Random(3))
    cycle = native_cycle_of(cycle_of(case.training, placement))
    first = step_ns_of(case.training, case.machine, placement, cycle, case.budget_bytes)
    assert step_ns_of(case.training, case.machine, placement, cycle, case.budget_bytes) == first


def test_a_cycle_of_parts_is_the_whole_cycle() -> None:
    for seed in range(60):
        case, draw = random_training(seed, 4), random.Random(seed)
        parts = CycleParts(case.training)
        first = random_placement(case, draw)
        for _ in range(6):  # from the second on, its layout is known
            other = random_placement(case, draw)
            mixed = tuple(
                one if (one.state is State.CPU) != (two.state is State.CPU) else two
                for one, two in zip(first.units, other.units, strict=True)
            )
            placement = replace(first, units=mixed)
            assert parts.cycle_of(placement) == native_cycle_of(cycle_of(case.training, placement)), seed


@pytest.mark.parametrize(
    ("unit", "bring_back", "message"),
    [
        (7, [-1], "tasks, units and copies of this cycle"),
        (0, [], "bring_back: expected one for each of 1 copies to the device"),
    ],
)
def test_a_copy_that_is_not_whole_is_refused(unit: int, bring_back: list[int], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        _C.TrainingCycle(
            kinds=[0, 1],
            durations_ns=[1, 1],
            needed_bytes=[0, 0],
            outs=[],
            ins=[(1, 0, 0, unit, True, False, False, False)],
            bring_back=bring_back,
            cpu_steps=[],
            units=1,
            overlap=1,
            room_share_of_steps=0.0,
            room_share_of_passes=0.0,
            clips=True,
            forward_waits_for_steps=False,
            delayed_update=False,
        )
