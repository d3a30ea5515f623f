"""One cell of the matrix: a training on a machine under a budget, by `auto` and by each published policy."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

from benchmarks.whole_state.decoders import MODELS, Decoder, recomputed_ns, training_of
from benchmarks.whole_state.executed_placement import execute_training
from benchmarks.whole_state.machines import MACHINES, Machine
from vdnn.errors import BudgetError, InvalidArgumentError
from vdnn.planning.published.whole_state import WHOLE_STATE_POLICIES
from vdnn.planning.training.auto_placement import auto_placement
from vdnn.planning.training.placement import EXACT, Allowed, Placement
from vdnn.planning.training.simulate_cycle import simulate_training
from vdnn.planning.training.training import Training
from vdnn.planning.training.training_bound import training_bound

SHARES = (1.0, 0.8, 0.6, 0.45, 0.3)  # of the card's memory
FREE = Allowed(cpu_steps=True, deferred=True)
_TOKENS = 16_384
_TOKENS_OF_THE_LARGEST = 4_096


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan of `auto`. Times are in nanoseconds; `plan_s` is processor time. `is_executed`: run as a program of
    streams and events, it took as long, held as much and moved as much as simulated, to the nanosecond and the
    byte."""

    step_ns: int
    bound_ns: int
    plan_s: float
    host_bytes: int
    peak_bytes: int
    is_executed: bool

    @property
    def gap(self) -> float:
        return self.step_ns / self.bound_ns - 1


@dataclass(frozen=True, slots=True)
class Cell:
    """`exact` and `free` are None where the training does not fit. `policies` has the steps of those that fit."""

    model: str
    machine: str
    budget_bytes: int
    share: float
    tokens: int
    computing_ns: int
    recomputed_ns: int
    exact: Planned | None
    free: Planned | None
    policies: dict[str, int]

    @property
    def name(self) -> str:
        return f"{self.model} on {self.machine} at {self.share:.0%}"

    def record(self) -> dict[str, object]:
        return asdict(self)


def cell_of(record: dict[str, object]) -> Cell:
    values = dict(record)
    for name in ("exact", "free"):
        if values[name] is not None:
            values[name] = Planned(**values[name])  # type: ignore[arg-type]
    return Cell(**values)  # type: ignore[arg-type]


def all_trainings() -> Iterator[tuple[Decoder, Machine]]:
    """In an order in which every model and machine comes early."""
    for turn in range(len(MACHINES)):
        for place, model in enumerate((*reversed(MODELS[:6]), *MODELS[6:])):
            yield model, MACHINES[(place + turn) % len(MACHINES)]


def cell_names() -> list[str]:
    return [f"{model.name} on {machine.name} at {share:.0%}" for model, machine in all_trainings() for share in SHARES]


def tokens_of(model: Decoder) -> int:
    return _TOKENS_OF_THE_LARGEST if model.weights > 50e9 else _TOKENS


def run_cells(model: Decoder, machine: Machine) -> Iterator[Cell]:
    """The cells of one training on one machine, from the smallest budget on. The plans of a budget are starts for the
    next one: what fits there fits here."""
    starts: dict[Allowed, list[Placement]] = {EXACT: [], FREE: []}
    for share in sorted(SHARES):
        yield _run_cell(model, machine, share, starts)


def _run_cell(model: Decoder, machine: Machine, share: float, starts: dict[Allowed, list[Placement]]) -> Cell:
    tokens = tokens_of(model)
    training, budget_bytes = training_of(model, machine, tokens), int(machine.card_bytes * share)
    policies = {}
    for policy in WHOLE_STATE_POLICIES:
        placement = policy.place(training, machine.training_machine, budget_bytes)
        if placement is not None:
            step = simulate_training(training, machine.training_machine, placement, budget_bytes)
            policies[policy.name] = step.step_ns
    exact = planned(training, machine, budget_bytes, EXACT, starts[EXACT])
    starts[FREE] += starts[EXACT][-1:]
    free = planned(training, machine, budget_bytes, FREE, starts[FREE])
    return Cell(
        model.name,
        machine.name,
        budget_bytes,
        share,
        tokens,
        training.computing_ns,
        recomputed_ns(training),
        exact,
        free,
        policies,
    )


def planned(
    training: Training, machine: Machine, budget_bytes: int, allowed: Allowed, starts: list[Placement]
) -> Planned | None:
    """Plans, and adds the placement to the starts."""
    began_s = time.process_time()
    try:
        step = auto_placement(training, machine.training_machine, budget_bytes, allowed, tuple(starts))
    except (BudgetError, InvalidArgumentError):
        return None
    plan_s = time.process_time() - began_s
    placement = step.placement
    starts.append(replace(placement, room_bytes=placement.room_of(budget_bytes)))
    bound_ns = training_bound(training, machine.training_machine, budget_bytes, allowed)
    executed = execute_training(training, machine.training_machine, placement, budget_bytes)
    is_executed = executed.outcome == (step.step_ns, step.peak_bytes, step.to_device_bytes, step.to_host_bytes)
    return Planned(step.step_ns, bound_ns, round(plan_s, 2), step.host_bytes, step.peak_bytes, is_executed)
