"""Better plans for sized plans, which a deep search looks for beside the training.

A training waits for its plans, so they come from a quick search. Where such a plan makes the step longer, a deep search
continues with the same step, on a native thread that never holds Python's lock (csrc/planning/background_search.h).
Its plan is taken over between two steps. Which plan that is depends on the step alone, in which step it comes does not.

One search runs at a time. Leaving the session cancels it.
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from vdnn import _C
from vdnn.errors import VdnnError
from vdnn.planning.costs import LinkCosts
from vdnn.planning.planned_step import PlannedStep, plan_step
from vdnn.planning.policies import PlanPolicy, PlanRequest
from vdnn.planning.search.auto import Auto, FoundPlans
from vdnn.planning.search.effort import DEEP
from vdnn.planning.search.plan_search import make_plan_search
from vdnn.runtime.steps.executor import Executor
from vdnn.runtime.steps.plan_table import SizedPlan
from vdnn.step.timeline import Timeline
from vdnn.user_warnings import warn

logger = logging.getLogger("vdnn")

# A plan is better if its step is shorter by more than this share: the steps in which the runtime learns it take longer.
_WORTH = 0.001
# The most searches that are begun for one sized plan. A session that is entered in each step cancels them.
_MOST_STARTS = 3


class _Running(NamedTuple):
    """A search, and the sized plan with the executor that it had when the search began."""

    search: _C.BackgroundSearch
    sized_plan: SizedPlan
    executor: Executor
    request: PlanRequest


class BetterPlans:
    """The searches of one session, whose quick plans `policy` makes. `costs` gives those of a recorded step."""

    def __init__(self, policy: PlanPolicy, costs: Callable[[Timeline | None], LinkCosts]) -> None:
        self._auto = policy if isinstance(policy, Auto) else None
        self._costs = costs
        self._waiting: deque[SizedPlan] = deque()
        self._starts: weakref.WeakKeyDictionary[Executor, int] = weakref.WeakKeyDictionary()
        self._running: list[_Running] = []  # at most one
        weakref.finalize(self, _cancel, self._running)  # also at the interpreter's end

    def ask(self, sized_plan: SizedPlan) -> None:
        """Looks for a better plan for a sized plan that was just made."""
        if (
            self._auto is None
            or sized_plan.is_provisional
            or sized_plan.is_over_somewhere
            or sized_plan.recording.has_host
            or sized_plan.is_bound_by_host
        ):
            return
        if (
            sized_plan.slowdown > 1 + _WORTH
            and sized_plan.executor.plan.budget_bytes is not None
            and sized_plan not in self._waiting
        ):
            self._waiting.append(sized_plan)
            self._start_next()

    def better(self) -> tuple[SizedPlan, PlannedStep] | None:
        """Called between two steps: a sized plan and its better plan, if a search has found one. Does not block."""
        if not self._running:
            self._start_next()
            return None
        running = self._running[0]
        if not running.search.is_done:
            return None
        self._running.clear()
        planned = None
        try:
            if running.sized_plan.executor is running.executor:  # it was not planned again meanwhile
                planned = self._planned(running)
        except Exception as error:
            self._give_up(error)
        self._start_next()
        return None if planned is None else (running.sized_plan, planned)

    def wait(self) -> None:
        """Blocks until the search that runs is done."""
        for running in self._running:
            while not running.search.wait_for(1.0):
                pass  # so that Ctrl-C is seen

    def stop(self) -> None:
        """Cancels the search that runs, and waits for its last evaluation. The next step begins it again."""
        for running in self._running:
            self._waiting.appendleft(running.sized_plan)
        _cancel(self._running)
        self._running.clear()

    def _start_next(self) -> None:
        while self._auto is not None and self._waiting and not self._running:
            sized_plan = self._waiting.popleft()
            starts = self._starts.get(sized_plan.executor, 0)
            if starts == _MOST_STARTS:
                continue
            self._starts[sized_plan.executor] = starts + 1
            request = PlanRequest(
                sized_plan.recording, self._costs(sized_plan.timeline), sized_plan.executor.plan.budget_bytes
            )
            try:
                search = _C.BackgroundSearch(make_plan_search(request, DEEP))
            except Exception as error:
                self._give_up(error)
            else:
                self._running.append(_Running(search, sized_plan, sized_plan.executor, request))

    def _planned(self, running: _Running) -> PlannedStep | None:
        """The best plan that fits, if it is worth a change. Raises what ended the search."""
        recording, costs, budget_bytes = running.request
        most_ns = (1 - _WORTH) * running.sized_plan.slowdown * recording.kept_ns
        for step_ns, chosen, absences in running.search.found:
            if step_ns > most_ns:
                return None
            policy = FoundPlans([(chosen, absences)])
            try:
                planned = plan_step(recording, costs, budget_bytes, policy, must_fit=True)
            except VdnnError:
                continue
            if planned.simulated.step_ns <= most_ns:
                return planned
        return None

    def _give_up(self, error: Exception) -> None:
        """No search runs any more in this session."""
        self._auto = None
        self._waiting.clear()
        warn(
            f"the search for better plans beside the training failed ({type(error).__name__}: {error}). The training "
            "goes on with the plans that it has."
        )


def _cancel(running: list[_Running]) -> None:
    for one in running:
        one.search.cancel()
