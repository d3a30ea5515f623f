"""Makes the guards of steps that have a budget in bytes."""

from __future__ import annotations

from collections.abc import Callable

from vdnn.runtime.steps.earlier_graphs import EarlierGraphs
from vdnn.runtime.steps.executor import Executor
from vdnn.runtime.steps.guard import Guard
from vdnn.runtime.steps.plan_book import PlanBook
from vdnn.runtime.steps.plan_guard import PlanGuard
from vdnn.runtime.steps.planner import BudgetPlanner
from vdnn.runtime.steps.settling import Settling
from vdnn.runtime.storage.managed_storage import ManagedStorage
from vdnn.runtime.storage.transport import Transport
from vdnn.runtime.torch_internals.module_watch import ModuleWatch


class StepGuards:
    """The guards of one session. `offload` issues a copy as soon as the running operation is over."""

    def __init__(
        self,
        planner: BudgetPlanner | None,
        plans: PlanBook,
        modules: ModuleWatch,
        settling: Settling,
        offload: Callable[[ManagedStorage], None],
    ) -> None:
        self._planner = planner
        self._plans = plans
        self._modules = modules
        self._settling = settling
        self._offload = offload
        self._transport: Transport | None = None  # of the last guard
        self.earlier = EarlierGraphs()

    def guard(
        self, transport: Transport | None, executor: Executor | None, resident_bytes: int, now_bytes: int
    ) -> Guard | None:
        """The guard of a step, or of the rest of one, which follows a plan or none; None if it has no budget in bytes.
        `resident_bytes` were allocated when the step began, `now_bytes` are at its first save."""
        budget_bytes = None
        if self._planner is not None and transport is not None:
            budget_bytes = self._planner.fixed_bytes(transport.device.info.total_bytes)
        if budget_bytes is None or transport is None:
            return None
        self._transport, transport.has_room = transport, None
        if executor is None:
            window_bytes = transport.wide_window_bytes
            taken_bytes = resident_bytes + self._modules.parameters.nbytes() + window_bytes
            guard = Guard(budget_bytes - taken_bytes, self._offload)
            guard.window_bytes, guard.in_flight_bytes = window_bytes, lambda: transport.in_flight_bytes
            transport.has_room = guard.has_room
        else:
            room_bytes = self._plans.room_bytes(executor, budget_bytes, now_bytes)
            if room_bytes is None:
                return None
            guard = PlanGuard(room_bytes, self._offload, executor, self._plans.unforeseen_bytes)
        guard.gated_bytes = self._settling.gated_bytes
        guard.earlier = self.earlier
        return guard

    def step_ended(self, guard: Guard | None, outliving: list[ManagedStorage]) -> int:
        """A step with this guard is over, and these of its storages are alive. Copies of freed graphs, and offloaded
        storages of live ones, must not count in the next step. Returns the bytes that earlier graphs held in it."""
        earlier_bytes = sum(self.earlier.bytes)
        kept = {} if guard is None else guard.kept
        if guard is not None:
            guard.step_ended()
        if self._transport is not None:
            self._transport.has_room = None
        for managed in outliving:
            managed.release()
            managed.release_unused_reload()  # of a plan that took it for another storage
        self.earlier.step_ended(outliving, kept)
        return earlier_bytes
