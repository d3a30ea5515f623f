"""No placement of a small random training has a shorter step than its bound, and bounds are near what can be had."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence

import pytest

from tests.drawn import quick_and_full
from tests.planning.training.random_trainings import RandomTraining, random_training
from vdnn.planning.training import copy_flow, unit_effects
from vdnn.planning.training.copy_flow import CopyFlow
from vdnn.planning.training.cycle import cycle_of
from vdnn.planning.training.native_cycle import native_cycle_of, step_ns_of
from vdnn.planning.training.placement import Placement, StepTime, unit_choices
from vdnn.planning.training.unit_effects import UnitEffects

_SLICE = 16 << 20
_TOLERANCE = 1e-6  # the solver's error


def bound_s(case: RandomTraining, step_time: StepTime) -> float:
    effects = UnitEffects(case.training, case.allowed, step_time)
    return CopyFlow(effects, case.machine, case.budget_bytes).least_s


def best_of_random_placements(case: RandomTraining, step_time: StepTime, draw: random.Random, tries: int) -> float:
    """The shortest step in seconds, infinite if none of them fits."""
    training, machine = case.training, case.machine
    choices = [unit_choices(training, index, case.allowed) for index in range(len(training.units))]
    best = float("inf")
    for _ in range(tries):
        placement = Placement(
            tuple(map(draw.choice, choices)),
            step_time,
            slice_bytes=draw.choice([_SLICE, 24 << 20, 64 << 20, 1 << 30]),
            overlap=draw.choice([1, 2, 4, 8]),
            room_share_of_steps=draw.choice([0.0, 0.25, 0.5, 1.0]),
            room_share_of_passes=draw.choice([0.0, 0.25, 0.5, 1.0]),
        )
        cycle = native_cycle_of(cycle_of(training, placement))
        if max(cycle.needed_bytes) <= case.budget_bytes and cycle.host_bytes <= machine.host_bytes:
            best = min(best, step_ns_of(training, machine, placement, cycle, case.budget_bytes) / 1e9)
    return best


@pytest.mark.slow
@quick_and_full("seeds", [*range(40), 240], range(400))  # 240: frozen parameters are used before and behind a step only
def test_no_placement_is_faster_than_its_bound(seeds: Sequence[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unit_effects, "LEAST_SLICE", _SLICE)  # so that small units step in slices, too
    ratios = []
    for seed in seeds:
        case, draw = random_training(seed, 2 + seed % 4), random.Random(seed)
        for step_time in case.allowed.step_times(case.training):
            best_s = best_of_random_placements(case, step_time, draw, 200)
            if best_s < float("inf"):
                ratios.append(best_s / bound_s(case, step_time))
                assert ratios[-1] >= 1 - _TOLERANCE, (seed, step_time)
    assert len(ratios) > len(seeds)
    assert statistics.median(ratios) < 1.1  # although the placements were drawn, not searched


def test_fewer_windows_or_parts_of_units_make_a_bound_lower(monkeypatch: pytest.MonkeyPatch) -> None:
    lower = [0, 0]
    for seed in range(12):
        case = random_training(seed, 4)
        bounds_s = [bound_s(case, StepTime.END)]
        for name, value in (("_MOST_WHOLE", 0), ("_MOST_WINDOWS", 4)):
            monkeypatch.setattr(copy_flow, name, value)
            bounds_s.append(bound_s(case, StepTime.END))
            assert bounds_s[-1] <= bounds_s[-2] * (1 + _TOLERANCE), (seed, name)
        lower = [count + (bounds_s[i + 1] < bounds_s[i] * 0.999) for i, count in enumerate(lower)]
        monkeypatch.undo()
    assert min(lower) > 1
