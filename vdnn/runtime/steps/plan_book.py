"""The plans that a session follows: one for each kind of step.

A step follows the plan of its expected kind. If that kind has no plan, the step is recorded to make one, as long as
there is room; otherwise it follows the plan of a step that began alike.

Executed steps are compared with their budget. If a step took more, the book plans again for that much less, or for the
memory that is resident now, a bounded number of times, and logs it. A step that turned out to be of another kind is not
compared.
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
from vdnn.user_warnings import warn

logger = logging.getLogger("vdnn")

# The most plans for steps of different kinds (two models in turn, training and another loss).
_MOST_PLANS = 8
_MOST_TIGHTENINGS = 3


@dataclass(slots=True)
class _Entry:
    executor: Executor
    first: SaveKey | None  # the first save of the steps that it is for
    recording: Recording | None = None  # None for a plan that the user gave
    timeline: Timeline | None = None
    tightened_bytes: int = 0
    tightenings: int = 0
    last_used: int = 0
    has_warned: bool = False


class PlanBook:
    """The plans of one session."""

    def __init__(self, plan: Plan | None, planner: BudgetPlanner | None) -> None:
        self._given = plan
        self._planner = planner
        self._kinds = StepKinds()
        self._uses = 0
        self._entries: dict[Kind | None, _Entry] = {}  # None: the plan that the user gave
        if plan is not None:
            executor = Executor(plan, is_given=True)
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
        """Forget the plans made so far: their recordings were not whole steps."""
        if self._given is None:
            self._entries.clear()
            self._kinds = StepKinds()

    def choose(self, first: SaveKey) -> Executor | None:
        """The executor for the step that begins with this save; None if the step may be recorded. All steps follow a
        plan that the user gave; steps that differ from it report how."""
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
        """Note the kind of a finished step."""
        if self._planner is not None:
            self._kinds.ended(first, kind)

    def recorded(self, recording: Recording, timeline: Timeline | None, kind: Kind) -> None:
        """Make a plan for a recorded step, if there is a planner and the kind has no plan yet. `timeline` is that of
        the recorded step."""
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
        """Compare a finished step that followed a plan with the plan's budget."""
        entry, planner = self._entries.get(kind), self._planner
        if entry is None or entry.executor is not executor or planner is None:
            return
        recording = entry.recording
        if recording is None or executor.differences or meter.peak_bytes <= planner.budget_bytes(recording):
            return
        # The resident memory may have grown since the recording, for example by another optimizer's state.
        now = with_resident(recording, meter.resident_bytes)
        has_grown = now.resident_bytes > recording.resident_bytes and planner.is_feasible(now)
        if has_grown:
            entry.recording = recording = now
        over_bytes = meter.peak_bytes - planner.budget_bytes(recording)
        if over_bytes <= 0:  # the budget is "min", and the least has risen
            executor.plan = replace(executor.plan, budget_bytes=planner.target_bytes(recording))
            return
        if entry.tightenings >= _MOST_TIGHTENINGS:
            return
        tightened_bytes = entry.tightened_bytes + (0 if has_grown else over_bytes)
        target_bytes = planner.target_bytes(recording, tightened_bytes)
        if not has_grown and target_bytes == executor.plan.budget_bytes:
            _warn_over_budget(entry, meter.peak_bytes, over_bytes)
            return
        entry.tightenings += 1
        entry.tightened_bytes = tightened_bytes
        _warn_tightened(entry, meter.peak_bytes, over_bytes)
        entry.executor = Executor(planner.plan(recording, entry.timeline, tightened_bytes))


def _warn_tightened(entry: _Entry, peak_bytes: int, over_bytes: int) -> None:
    logger.warning(
        "vdnn: the step took %s, %s more than its budget: planned again for that much less (%d of at most %d times).",
        format_bytes(peak_bytes),
        format_bytes(over_bytes),
        entry.tightenings,
        _MOST_TIGHTENINGS,
    )


def _warn_over_budget(entry: _Entry, peak_bytes: int, over_bytes: int) -> None:
    if not entry.has_warned:
        entry.has_warned = True
        warn(
            f"the step took {format_bytes(peak_bytes)}, {format_bytes(over_bytes)} more than its budget, and no plan "
            "takes less."
        )
