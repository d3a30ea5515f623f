"""Small random trainings and machines for the tests of whole-training plans."""

from __future__ import annotations

import random
from typing import NamedTuple

from vdnn.planning.costs import LinkCosts
from vdnn.planning.training.cycle import cycle_of
from vdnn.planning.training.placement import Allowed, Placement, UnitPlacement
from vdnn.planning.training.training import Training, TrainingMachine, Unit

_MIB = 1 << 20


class RandomTraining(NamedTuple):
    training: Training
    machine: TrainingMachine
    allowed: Allowed
    budget_bytes: int


def random_unit(draw: random.Random, name: str) -> Unit:
    weights = draw.choice([0, 1, 1, 1]) * draw.randint(1, 20) * _MIB
    saved, forward_ns = draw.randint(1, 60) * _MIB, draw.randint(1, 20) * 1_000_000
    return Unit(
        name=name,
        weight_bytes=weights,
        frozen_bytes=draw.choice([0, 0, 10 * _MIB]),
        gradient_bytes=weights,
        state_bytes=6 * weights,
        saved_bytes=saved,
        boundary_bytes=draw.randint(0, saved),
        forward_ns=forward_ns,
        backward_ns=2 * forward_ns,
        forward_transient_bytes=draw.randint(0, 5) * _MIB,
        backward_transient_bytes=draw.randint(0, 9) * _MIB,
        step_ns=draw.randint(0, 3) * 1_000_000,
        host_step_bytes=14 * weights,
        step_reads_weights=draw.random() < 0.3,
    )


def random_training(seed: int, units: int) -> RandomTraining:
    draw = random.Random(seed)
    training = Training(
        "a random training",
        tuple(random_unit(draw, f"unit {index}") for index in range(units)),
        micro_batches=draw.choice([1, 1, 2]),
        clips=draw.random() < 0.5,
    )
    link = LinkCosts(draw.choice([5e9, 2e10]), draw.choice([5e9, 2e10]), 2.2e10, 10_000)
    machine = TrainingMachine(
        "a random machine", link, draw.choice([1, 8]) << 28, draw.choice([1e10, 4e10, 2e11]), draw.choice([1e10, 5e10])
    )
    allowed = Allowed(draw.random() < 0.5, draw.random() < 0.5, draw.random() < 0.5)
    kept = max(cycle_of(training, Placement((UnitPlacement(),) * units)).needed_bytes)
    return RandomTraining(training, machine, allowed, int(kept * draw.uniform(0.3, 1.0)))
