"""The plans that a session follows, by the first save of the step that each is for; and what became of them.

A plan is checked against what was executed: a step that took more than its budget leads to a plan for so much less, a
bounded number of times, and that is said.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from vdnn.bytesize import format_bytes
from vdnn.recording import Recording, SaveKey
from vdnn.runtime.budget_planner import BudgetPlanner
from vdnn.runtime.executor import Executor
from vdnn.runtime.spans import span
from vdnn.step_plan import Plan
from vdnn.timeline import Timeline

logger = logging.getLogger("vdnn")

# Plans for steps that begin differently (two models in turn, training and another loss): more are not remembered.
_MOST_PLANS = 8
_MOST_TIGHTENINGS = 3


@dataclass(slots=True)
class _Entry:
    executor: Executor
    recording: Recording | None = None  # of a plan that was made here
    timeline: Timeline | None = None
    tightened_bytes: int = 0
    tightenings: int = 0


class PlanBook:
    """Of one session."""

    def __init__(self, plan: Plan | None, planner: BudgetPlanner | None) -> None:
        self._given = plan
        self._planner = planner
        self._entries: dict[SaveKey | None, _Entry] = {}
        if plan is not None:
            executor = Executor(plan)
            self._entries[executor.first_key] = _Entry(executor)

    @property
    def is_planning(self) -> bool:
        return self._planner is not None

    @property
    def latest(self) -> Plan | None:
        entry = next(reversed(self._entries.values()), None)
        return None if entry is None else entry.executor.plan

    @property
    def first_difference(self) -> str | None:
        found = (entry.executor.first_difference for entry in self._entries.values())
        return next((one for one in found if one), None)

    def forget_made(self) -> None:
        """What was recorded was no whole step."""
        if self._given is None:
            self._entries.clear()

    def choose(self, first: SaveKey) -> Executor | None:
        """A step that begins as no plan does follows the only plan there is, if it was given: then it says how it
        differs."""
        entry = self._entries.get(first)
        if entry is None and self._given is not None:
            entry = next(iter(self._entries.values()))
        return None if entry is None else entry.executor

    def recorded(self, recording: Recording, timeline: Timeline | None) -> None:
        """Plans for the step that was recorded, if anybody plans. The timeline may be asked for in vain: it waits for
        the device."""
        if self._planner is None or not recording.lifetimes:
            return
        with span("plan"):
            executor = Executor(self._planner.plan(recording, timeline))
        while len(self._entries) >= _MOST_PLANS:
            del self._entries[next(iter(self._entries))]
        self._entries[executor.first_key] = _Entry(executor, recording, timeline)

    def executed(self, executor: Executor, peak_bytes: int) -> None:
        """A step under a plan is over, and took so much."""
        entry = self._entries.get(executor.first_key)
        if entry is None or entry.executor is not executor or entry.recording is None or self._planner is None:
            return
        over_bytes = peak_bytes - self._planner.budget_bytes(entry.recording)
        if over_bytes <= 0 or executor.differences:
            return
        if entry.tightenings >= _MOST_TIGHTENINGS:
            return
        entry.tightenings += 1
        entry.tightened_bytes += over_bytes
        logger.warning(
            "vdnn: the step took %s, %s more than its budget: planned anew for so much less (%d of at most %d times).",
            format_bytes(peak_bytes),
            format_bytes(over_bytes),
            entry.tightenings,
            _MOST_TIGHTENINGS,
        )
        entry.executor = Executor(self._planner.plan(entry.recording, entry.timeline, entry.tightened_bytes))
