"""The plans that a session follows, by the kind of step that each is for; and what became of them.

A step follows the plan of the kind that it is expected to be. One that is expected to be of a kind without a plan is
recorded for one, as long as there is room; else it follows the plan of a step that began alike.

A plan is checked against what was executed: a step that took more than its budget leads to a plan for so much less, or
for the memory that is there now, a bounded number of times, and that is said. A step that turned out to be of another
kind says nothing of its plan.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from vdnn.bytesize import format_bytes
from vdnn.runtime.steps.executor import Executor
from vdnn.runtime.steps.kinds import Kind, StepKinds
from vdnn.runtime.steps.meter import Meter
from vdnn.runtime.steps.planner import BudgetPlanner, with_resident
from vdnn.runtime.torch_internals.spans import span
from vdnn.step.plan import Plan
from vdnn.step.recording import Recording, SaveKey
from vdnn.step.timeline import Timeline

logger = logging.getLogger("vdnn")

# Plans for steps of different kinds (two models in turn, training and another loss): more are not remembered.
_MOST_PLANS = 8
_MOST_TIGHTENINGS = 3


@dataclass(slots=True)
class _Entry:
    executor: Executor
    first: SaveKey | None  # of the steps that it is for
    recording: Recording | None = None  # of a plan that was made here
    timeline: Timeline | None = None
    tightened_bytes: int = 0
    tightenings: int = 0
    last_used: int = 0
    has_said_that_it_is_over: bool = False


class PlanBook:
    """Of one session."""

    def __init__(self, plan: Plan | None, planner: BudgetPlanner | None) -> None:
        self._given = plan
        self._planner = planner
        self._kinds = StepKinds()
        self._uses = 0
        self._entries: dict[Kind | None, _Entry] = {}  # None: of the plan that was given
        if plan is not None:
            executor = Executor(plan)
            self._entries[None] = _Entry(executor, executor.first_key)

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
            self._kinds = StepKinds()

    def choose(self, first: SaveKey) -> Executor | None:
        """What the step that begins with this save follows; None: it is recorded if anybody records. A plan that was
        given is followed by all steps: one that is another says how it differs."""
        expected = self._kinds.expected(first)
        entry = self._entries.get(None)
        if entry is None and expected is not None:
            entry = self._entries.get(expected.kind)
        if entry is None:
            alike = [one for one in self._entries.values() if one.first == first]
            if not alike or (expected is not None and expected.is_likely and len(self._entries) < _MOST_PLANS):
                return None
            entry = max(alike, key=lambda one: one.last_used)
        self._uses += 1
        entry.last_used = self._uses
        return entry.executor

    def ended(self, first: SaveKey, kind: Kind) -> None:
        """A step is over, and this is what it was."""
        if self._planner is not None:
            self._kinds.ended(first, kind)

    def recorded(self, recording: Recording, timeline: Timeline | None, kind: Kind) -> None:
        """Plans for the step that was recorded, if anybody plans and its kind has no plan yet. The timeline may be
        asked for in vain: it waits for the device."""
        if self._planner is None or not recording.lifetimes or kind in self._entries:
            return
        with span("plan"):
            executor = Executor(self._planner.plan(recording, timeline))
        while len(self._entries) >= _MOST_PLANS:
            del self._entries[next(iter(self._entries))]
        first = next((point.key for point in recording.points if point.key is not None), None)
        self._uses += 1
        self._entries[kind] = _Entry(executor, first, recording, timeline, last_used=self._uses)

    def executed(self, executor: Executor, meter: Meter, kind: Kind) -> None:
        """A step of this kind is over that followed a plan."""
        entry, planner = self._entries.get(kind), self._planner
        if entry is None or entry.executor is not executor or entry.recording is None or planner is None:
            return
        if executor.differences or meter.peak_bytes <= planner.budget_bytes(entry.recording):
            return
        # Another optimizer's state, say, that was not there when the step was recorded.
        now = with_resident(entry.recording, meter.resident_bytes)
        has_grown = now.resident_bytes > entry.recording.resident_bytes and planner.is_feasible(now)
        if has_grown:
            entry.recording = now
        over_bytes = meter.peak_bytes - planner.budget_bytes(entry.recording)
        if over_bytes <= 0:  # what was asked for is the least, and that has risen
            executor.plan = replace(executor.plan, budget_bytes=planner.target_bytes(entry.recording))
        elif entry.tightenings < _MOST_TIGHTENINGS:
            self._tighten(entry, planner, meter.peak_bytes, over_bytes, 0 if has_grown else over_bytes)

    def _tighten(
        self, entry: _Entry, planner: BudgetPlanner, peak_bytes: int, over_bytes: int, tighter_bytes: int
    ) -> None:
        """`tighter_bytes` may be 0: what was recorded has changed."""
        assert entry.recording is not None, "the plan was made here"
        tightened_bytes = entry.tightened_bytes + tighter_bytes
        target_bytes = planner.target_bytes(entry.recording, tightened_bytes)
        if tighter_bytes and target_bytes == entry.executor.plan.budget_bytes:
            self._say_that_it_is_over(entry, peak_bytes, over_bytes)
            return
        entry.tightenings += 1
        entry.tightened_bytes = tightened_bytes
        logger.warning(
            "vdnn: the step took %s, %s more than its budget: planned anew for so much less (%d of at most %d times).",
            format_bytes(peak_bytes),
            format_bytes(over_bytes),
            entry.tightenings,
            _MOST_TIGHTENINGS,
        )
        entry.executor = Executor(planner.plan(entry.recording, entry.timeline, tightened_bytes))

    def _say_that_it_is_over(self, entry: _Entry, peak_bytes: int, over_bytes: int) -> None:
        if not entry.has_said_that_it_is_over:
            entry.has_said_that_it_is_over = True
            logger.warning(
                "vdnn: the step took %s, %s more than its budget, and no plan takes less.",
                format_bytes(peak_bytes),
                format_bytes(over_bytes),
            )
