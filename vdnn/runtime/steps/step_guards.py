"""Makes the guards of steps that have a budget in bytes."""

from __future__ import annotations

from collections.abc import Callable

from vdnn.runtime.steps.executor import Executor
from vdnn.runtime.steps.guard import Guard
from vdnn.runtime.steps.plan_book import PlanBook
from vdnn.runtime.steps.plan_guard import PlanGuard
from vdnn.runtime.steps.planner import BudgetPlanner
from vdnn.runtime.storage.managed_storage import ManagedStorage
from vdnn.runtime.storage.transport import Transport


class StepGuards:
    """The guards of one session. `offload` issues a copy as soon as the running operation is over."""

    def __init__(
        self, planner: BudgetPlanner | None, plans: PlanBook, offload: Callable[[ManagedStorage], None]
    ) -> None:
        self._planner = planner
        self._plans = plans
        self._offload = offload

    def of_plan(self, transport: Transport | None, executor: Executor, now_bytes: int) -> Guard | None:
        """The guard of a step that follows a plan. `now_bytes` are allocated at its first save."""
        budget_bytes = self._budget_bytes(transport)
        room_bytes = None if budget_bytes is None else self._plans.room_bytes(executor, budget_bytes, now_bytes)
        return None if room_bytes is None else PlanGuard(room_bytes, self._offload, executor)

    def without_plan(self, transport: Transport | None, taken_bytes: int) -> Guard | None:
        """The guard of a step, or of the rest of one. `taken_bytes`: what it cannot use of the budget."""
        budget_bytes = self._budget_bytes(transport)
        if budget_bytes is None or transport is None:
            return None
        return Guard(budget_bytes - taken_bytes - transport.windows_bytes, self._offload)

    def _budget_bytes(self, transport: Transport | None) -> int | None:
        if self._planner is None or transport is None:
            return None
        return self._planner.fixed_bytes(transport.device.info.total_bytes)
