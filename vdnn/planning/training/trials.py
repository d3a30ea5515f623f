"""Trials: the placements that the search has simulated, with their results, and the work that it has left.

The work is counted in simulated tasks and moves, not in seconds, so that a plan does not depend on the machine that
makes it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from vdnn.bytesize import format_bytes
from vdnn.errors import BudgetError, InvalidArgumentError
from vdnn.planning.training.cycle_parts import CycleParts
from vdnn.planning.training.native_cycle import step_ns_of
from vdnn.planning.training.placement import Placement
from vdnn.planning.training.simulate_cycle import TrainingStep, simulate_training
from vdnn.planning.training.training import Training, TrainingMachine


class SimulatedPlacement(NamedTuple):
    """A placement with the time and the moved bytes of its simulated step. The smaller of two is better."""

    step_ns: int
    moved_bytes: int
    placement: Placement


class Trials:
    """`best` is the best trial that fits, and `work` the part of `most_work` that is left. `on_progress` is called with
    the share of the work that is done."""

    def __init__(
        self,
        training: Training,
        machine: TrainingMachine,
        budget_bytes: int,
        *,
        most_work: int,
        on_progress: Callable[[float], None],
    ) -> None:
        self.training, self.machine, self.budget_bytes = training, machine, budget_bytes
        self.best: SimulatedPlacement | None = None
        self.most_work = self.work = most_work
        self._on_progress = on_progress
        self._least_bytes: int | None = None
        self._least_host_bytes: int | None = None  # of those that fit the device
        self._parts = CycleParts(training)
        self._seen: dict[Placement, tuple[float, float, int]] = {}

    def value_of(self, placement: Placement) -> tuple[float, float, int]:
        """Smaller is better: first the missing bytes on the device and the host, then the time, then the moved
        bytes."""
        known = self._seen.get(placement)
        if known is not None:
            return known
        cycle = self._parts.cycle_of(placement)
        peak = max(cycle.needed_bytes)
        over = max(0, peak - self.budget_bytes)
        host_over = max(0, cycle.host_bytes - self.machine.host_bytes)
        if self._least_bytes is None or peak < self._least_bytes:
            self._least_bytes = peak
        if not over and (self._least_host_bytes is None or cycle.host_bytes < self._least_host_bytes):
            self._least_host_bytes = cycle.host_bytes
        if over or host_over:
            value = (float(over + host_over), float("inf"), 0)
        else:
            step_ns = step_ns_of(self.training, self.machine, placement, cycle, self.budget_bytes)
            self.work -= cycle.size
            self._on_progress(min(1.0, 1 - self.work / self.most_work))
            value = (0.0, float(step_ns), cycle.moved_bytes)
            if self.best is None or (step_ns, cycle.moved_bytes) < self.best[:2]:
                self.best = SimulatedPlacement(step_ns, cycle.moved_bytes, placement)
        self._seen[placement] = value
        return value

    def answer(self) -> TrainingStep:
        """The step of the best trial. Raises BudgetError if no placement fits the device, and InvalidArgumentError if
        none of those fits the host."""
        if self.best is not None:
            return simulate_training(self.training, self.machine, self.best.placement, self.budget_bytes)
        if self._least_host_bytes is not None:
            needed = self._least_host_bytes
            raise InvalidArgumentError(
                argument="host",
                expected=f"at least {format_bytes(needed)} ({needed} bytes) of memory for {self.training.name} under "
                f"{format_bytes(self.budget_bytes)} of the device",
                got=format_bytes(self.machine.host_bytes),
            )
        raise BudgetError(
            budget_bytes=self.budget_bytes,
            least_bytes=self._least_bytes or 0,
            where=f"a step of {self.training.name}",
            resident_bytes=self.training.fixed_bytes,
            way_out="Raise the budget, or take fewer tokens in a micro-batch",
        )
