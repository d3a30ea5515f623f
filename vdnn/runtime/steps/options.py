"""What a session does with its steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from vdnn.runtime.machine.gauges import Gauges
from vdnn.runtime.recompute.codecs import LOSSLESS
from vdnn.runtime.steps.planner import BudgetPlanner
from vdnn.runtime.storage.transport import Transport
from vdnn.step.plan import Plan


@dataclass(frozen=True, slots=True)
class StepOptions:
    """Without gauges nothing is recorded and measured: a plan needs none. `recomputes`: what can be may be recomputed,
    or packed by these codecs."""

    gauges_for: Callable[[Transport], Gauges] | None = None
    warmup_steps: int = 1
    plan: Plan | None = None
    planner: BudgetPlanner | None = None
    recomputes: bool = True
    codecs: tuple[str, ...] = LOSSLESS
