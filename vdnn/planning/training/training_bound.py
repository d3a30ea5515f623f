"""A certified lower bound on the step of a whole training: no placement under the budget has a shorter one.

It is the solution of the linear program of copy_flow.py. Each time of the optimizer's step has a program of its own;
the least solution counts.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from vdnn.planning.training.copy_flow import CopyFlow
from vdnn.planning.training.estimate import Estimate
from vdnn.planning.training.placement import EXACT, Allowed, StepTime, UnitPlacement
from vdnn.planning.training.training import Training, TrainingMachine
from vdnn.planning.training.unit_effects import UnitEffects

_TOLERANCE = 1e-6  # the solver's error


@dataclass(frozen=True, slots=True)
class Relaxation:
    """The solution of the program for one time of the step: for each unit, the parts of placements other than to keep
    everything on the device. `least_s` is infinite if no placement fits."""

    step_time: StepTime
    least_s: float
    parts: tuple[tuple[tuple[UnitPlacement, float], ...], ...]
    estimate: Estimate


@functools.lru_cache(maxsize=12)  # a search and the bound of its plan ask for the same
def relaxations(
    training: Training, machine: TrainingMachine, budget_bytes: int, allowed: Allowed = EXACT
) -> tuple[Relaxation, ...]:
    """One for each time of the step, the shortest first. Needs SciPy, the extra `plan`."""
    found = [_relaxed(training, machine, budget_bytes, allowed, one) for one in allowed.step_times(training)]
    return tuple(sorted(found, key=lambda one: one.least_s))


def _relaxed(
    training: Training, machine: TrainingMachine, budget_bytes: int, allowed: Allowed, step_time: StepTime
) -> Relaxation:
    effects = UnitEffects(training, allowed, step_time)
    flow = CopyFlow(effects, machine, budget_bytes)
    parts = tuple(tuple((one, flow.parts[column]) for one, column in columns.items()) for columns in effects.columns)
    estimate = Estimate.of_effects(effects, machine, budget_bytes)
    return Relaxation(step_time, flow.least_s, () if math.isinf(flow.least_s) else parts, estimate)


def training_bound(training: Training, machine: TrainingMachine, budget_bytes: int, allowed: Allowed = EXACT) -> int:
    """The least time of a step in nanoseconds. Needs SciPy, the extra `plan`."""
    least_s = relaxations(training, machine, budget_bytes, allowed)[0].least_s
    least_ns = max(
        training.computing_ns - _cpu_savings_ns(training, allowed), training.issue_ns - _cpu_issue_ns(training, allowed)
    )
    return least_ns if math.isinf(least_s) else max(least_ns, round(least_s * (1 - _TOLERANCE) * 1e9))


def _cpu_savings_ns(training: Training, allowed: Allowed) -> int:
    """A step on the CPU takes no time of the device."""
    return sum(unit.step_ns for unit in training.units) if allowed.cpu_steps else 0


def _cpu_issue_ns(training: Training, allowed: Allowed) -> int:
    """Nor does the host issue it."""
    return sum(unit.step_issue_ns for unit in training.units) if allowed.cpu_steps else 0
