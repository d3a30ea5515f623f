"""The options of a session that concern its steps: measure, record, plan, recompute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from vdnn.runtime.machine.gauges import Gauges
from vdnn.runtime.recompute.codecs import LOSSLESS
from vdnn.runtime.steps.plan_store import PlanFolder
from vdnn.runtime.steps.planner import BudgetPlanner
from vdnn.runtime.storage.transport import Transport
from vdnn.step.plan import Plan


@dataclass(frozen=True, slots=True)
class StepOptions:
    """Options for steps. Without gauges nothing is recorded or measured; following a plan needs none. `measures`: every
    step is measured, not only those that are recorded or checked. `recomputes`: plans may recompute storages, or pack
    them by these codecs. `folder` has the plans of earlier runs."""

    gauges_for: Callable[[Transport], Gauges] | None = None
    measures: bool = False
    warmup_steps: int = 1
    plan: Plan | None = None
    planner: BudgetPlanner | None = None
    recomputes: bool = True
    codecs: tuple[str, ...] = LOSSLESS
    folder: PlanFolder | None = None

    @property
    def unmeasured_steps(self) -> int:
        """The first steps that are neither recorded nor measured. With a budget in bytes there are none. The budget
        "min" is what a step takes at least, and the first ones may take less than those behind them."""
        return 0 if self.planner is not None and not self.planner.wants_the_least else self.warmup_steps
