"""The plan table of one kind of step, with a sized plan for each planned size. Decides when a recorded step needs a new
plan, and counts for the report which plans steps followed.

A plan serves every step of its kind that is not larger, because such a step takes no more memory at any point. So a
step follows the smallest plan that serves it. If no plan is known to serve it, it follows the largest one, and a guard
makes room for larger storages. A far larger step follows no plan. Sizes that were not recorded get plans from predicted
steps (size_model.py).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from enum import Enum

from vdnn.planning.footprint import interval_bytes, stored_bytes
from vdnn.planning.least_memory import least_bytes
from vdnn.planning.planned_step import PlannedStep
from vdnn.runtime.steps.executor import Executor, Occupancy
from vdnn.runtime.steps.host_meter import HostOfPlan
from vdnn.runtime.steps.size_model import RecordedSizes
from vdnn.step.forms import is_within
from vdnn.step.made_steps import first_point, first_save
from vdnn.step.plan import Action
from vdnn.step.plan_use import Followed, PlanSummary, PlanUse, StepCount
from vdnn.step.recording import Recording, SaveKey
from vdnn.step.timeline import Timeline

# A plan serves steps down to this share of its size well, and any step if it slows down by no more than `_FREE`. One
# that slows down by more than `_CHEAP` is worth recording a smaller step for.
_NEAR = 0.95
_FREE = 1.005
_CHEAP = 1.1
# A step follows no plan that would have to be this many times as large.
_FAR = 1.5
# The most sized plans of a table, and the most first saves that one of them remembers.
_MOST_PLANS = 16
_MOST_SIZES = 64
_MOST_REPLACED = 4


class PlanOrigin(Enum):
    """The kind of recordings that a sized plan was made from."""

    RECORDED = "a recorded step"
    WARM_UP = "a recorded step of the warm-up"
    MADE = "steps of other sizes"
    GUESSED = "one step of another size"


class SizedPlan:
    """A plan for the steps of one kind up to one size, and the recording and timeline that it was made from."""

    def __init__(
        self,
        planned: PlannedStep,
        recording: Recording,
        timeline: Timeline | None,
        origin: PlanOrigin = PlanOrigin.RECORDED,
    ) -> None:
        self.timeline = timeline
        self.origin = origin
        self.tightened_bytes = 0
        self.tightenings = 0
        self.steps = 0  # that followed it
        self.more_bytes = 0  # allocated at the first save of the last one of these, beyond those of the recording
        self.has_warned = False
        self.misfit_steps = 0  # until when steps are recorded, because one differed from it and exceeded the budget
        self.is_over_somewhere = False  # no plan met the budget with what was resident
        self.is_stored = False  # an earlier run made it
        self.host: HostOfPlan | None = None  # in the last steps that followed it and were measured
        self.is_bound_by_host = False
        self.plans_for_host = 0
        self.is_host_misread = False  # a plan for the host that was measured made steps slower
        self._served: list[SaveKey] = []  # first saves of larger steps that it served
        self._roomier: tuple[Recording, PlannedStep] | None = None  # before more was resident
        self._before_host: tuple[int, Recording, PlannedStep] | None = None  # with the time of its shortest step
        self._planned = planned
        self.follow(recording, planned)

    def follow(self, recording: Recording, planned: PlannedStep) -> None:
        """From now on steps of this size follow `planned`."""
        self.recording, self._planned = recording, planned
        self._before_host = None
        self._least_bytes: int | None = None
        lifetimes = planned.plan.lifetimes
        followed = planned.followed
        occupancy = Occupancy(
            stored_bytes(followed, lifetimes),
            stored_bytes(followed, lifetimes, {Action.KEEP}),
            interval_bytes(followed, lifetimes),
        )
        self.executor = Executor(planned.plan, occupancy)
        self.slowdown = planned.slowdown
        self.peak_bytes = planned.simulated.peak_bytes

    def follow_with_less_room(self, recording: Recording, planned: PlannedStep) -> None:
        """Follows a plan that leaves less room, as long as more is resident than when the step was recorded."""
        roomier = self._roomier or (self.recording, self._planned)
        self.follow(recording, planned)
        self._roomier = roomier

    def follow_with_room_again(self, allocated_bytes: int) -> bool:
        """Follows the plan from before `follow_with_less_room` again, if the memory that was resident then is free.
        Returns False if `allocated_bytes` at the first save are too many for that plan."""
        if self._roomier is None or allocated_bytes > first_point(self._roomier[0]).allocated_bytes:
            return False
        (recording, planned), self._roomier = self._roomier, None
        self.follow(recording, planned)
        return True

    def follow_for_host(self, recording: Recording, planned: PlannedStep) -> None:
        """Follows a plan for the host that was measured."""
        before = self.recording, self._planned
        self.follow(recording, planned)
        if self.host is not None and self.host.step_ns is not None:
            self._before_host = self.host.step_ns, *before

    def follow_as_before_host(self, host: HostOfPlan, slower: float) -> bool:
        """Follows the plan from before `follow_for_host` again if steps took longer since, by more than the share
        `slower`. From then on what is measured of the host is not planned with."""
        if self._before_host is None or host.step_ns is None:
            return False
        before_ns, recording, planned = self._before_host
        if host.step_ns <= (1 + slower) * before_ns:
            return False
        self.follow(recording, planned)
        self.is_host_misread, self.is_bound_by_host = True, False
        return True

    @property
    def host_to_plan_for(self) -> HostOfPlan | None:
        return None if self.is_host_misread else self.host

    def least_bytes(self, resident_bytes: int) -> int:
        """The smallest budget that the recorded step can meet with `resident_bytes` allocated when it begins."""
        if self._least_bytes is None:
            self._least_bytes = least_bytes(self.recording)
        return self._least_bytes + resident_bytes - self.recording.resident_bytes

    @property
    def is_provisional(self) -> bool:
        """True if the next step is recorded for a better plan. A guess that costs nothing stays."""
        return self.origin is PlanOrigin.WARM_UP or (self.origin is PlanOrigin.GUESSED and self.slowdown > _FREE)

    @property
    def is_misfit(self) -> bool:
        return self.misfit_steps > 0

    @property
    def first(self) -> SaveKey:
        return self.executor.saves[0].key

    @property
    def nbytes(self) -> int:
        return self.recording.managed_bytes

    def serves(self, first: SaveKey) -> bool:
        """True if a step with this first save is known not to be larger."""
        return is_within(first, self.first) or any(is_within(first, one) for one in self._served)

    def is_far_above(self, first: SaveKey) -> bool:
        """True if a step with this first save may have a faster plan, because it is much smaller."""
        return self.slowdown > _FREE and math.prod(first.size) < _NEAR * math.prod(self.first.size)

    @property
    def larger_steps(self) -> tuple[SaveKey, ...]:
        """The first saves of larger steps that the plan served."""
        return tuple(self._served)

    def served(self, first: SaveKey) -> None:
        """Notes that a step with this first save followed the plan and was not larger."""
        if not self.serves(first):
            larger = [one for one in self._served if not is_within(one, first)]
            self._served = [*larger, first][-_MOST_SIZES:]


class PlanTable:
    """The sized plans of one kind of step, the smallest first."""

    def __init__(self, recorded: RecordedSizes) -> None:
        self.recorded = recorded
        self.plans: list[SizedPlan] = []
        self.last_used = 0
        self.replaced = 0  # plans that did not fit
        # Recorded with other training state on the device. Steps take `more_bytes` beyond what is allocated when they
        # begin.
        self.is_of_other_state = False
        self.more_bytes = 0
        self.records_all = False  # the first save does not tell the size of a step, so all steps are recorded

    def choose(self, first: SaveKey) -> SizedPlan | None:
        """The plan that is known to serve a step that begins with this save."""
        plans = reversed(self.plans) if self.records_all else self.plans
        return next((sized_plan for sized_plan in plans if sized_plan.serves(first)), None)

    def is_far_below(self, first: SaveKey) -> bool:
        """True if a step with this first save is so much larger than every planned size that following a plan is worse
        than following none."""
        return math.prod(first.size) > _FAR * math.prod(self.plans[-1].first.size)

    def deserves_own(self, sized_plan: SizedPlan, first: SaveKey) -> bool:
        """True if this plan is so slow that a step far below its size gets a plan of its own."""
        return sized_plan.slowdown > _CHEAP and sized_plan.is_far_above(first) and len(self.plans) < _MOST_PLANS

    @property
    def may_replace(self) -> bool:
        """True if a plan that does not fit may still be replaced. The number is bounded: steps that alternate would
        otherwise cause a new plan in each step."""
        return self.replaced < _MOST_REPLACED

    def find_near(self, first: SaveKey, recording: Recording) -> bool:
        """True if a plan serves a recorded step well, so that it needs none of its own."""
        nbytes = recording.managed_bytes
        return any(
            sized_plan.serves(first) and _NEAR * sized_plan.nbytes <= nbytes <= sized_plan.nbytes
            for sized_plan in self.plans
        )

    def plan_of(self, executor: Executor) -> SizedPlan | None:
        """The sized plan that has this executor."""
        return next((one for one in self.plans if one.executor is executor), None)

    def largest_without(self, wrong: SizedPlan | None) -> SizedPlan | None:
        """The largest plan, ignoring `wrong` and the guesses made beside it."""
        plans = self._without(wrong)
        return plans[-1] if plans else None

    def replace(self, wrong: SizedPlan | None, sized_plan: SizedPlan) -> None:
        """Removes the wrong plan, and adds another one."""
        self.plans = self._without(wrong)
        self.add(sized_plan)

    def _without(self, wrong: SizedPlan | None) -> list[SizedPlan]:
        """The plans except for `wrong`. If there is a wrong one, guesses are left out, too."""
        if wrong is None:
            return self.plans
        return [one for one in self.plans if one is not wrong and one.origin is not PlanOrigin.GUESSED]

    def add(self, sized_plan: SizedPlan) -> None:
        """Adds a plan. If several plans have first saves of one size, only the largest remains, because the first save
        of a step cannot tell them apart."""
        alike = [one for one in self.plans if one.first.size == sized_plan.first.size]
        if any(one.nbytes > sized_plan.nbytes for one in alike):
            return
        self.plans = sorted([*(one for one in self.plans if one not in alike), sized_plan], key=lambda one: one.nbytes)
        if len(self.plans) > _MOST_PLANS:
            self.plans.remove(min(self.plans[:-1], key=lambda one: one.steps))


# A step that is larger than its plan by no more than this is not planned anew: its guard balances that.
_TOLERANCE = 1.01
# A prediction from recorded steps was mistaken if the peak is off by this share, or the time shorter by that one.
_MISTAKEN_PEAK = 0.01
_MISTAKEN_TIME = 0.05


def needs_plan(
    table: PlanTable, sized_plan: SizedPlan | None, recording: Recording, *, is_planned: bool, has_grown: bool
) -> bool:
    """True if a recorded step had no plan of its size, or was larger than its plan, or so much smaller that it gets a
    plan of its own. `sized_plan`: the one that it followed."""
    first = first_save(recording)
    if not is_planned:
        return not table.find_near(first, recording)
    if sized_plan is None:
        return False  # it followed a plan of another kind, and its own has some
    if has_grown:
        return recording.managed_bytes > _TOLERANCE * sized_plan.nbytes
    sized_plan.served(first)
    return table.deserves_own(sized_plan, first)


def is_mistaken(sized_plan: SizedPlan, predicted: Recording | None, recorded: Recording) -> bool:
    """True if a step that followed this plan took other memory or time than predicted."""
    if predicted is None or sized_plan.origin is PlanOrigin.RECORDED:
        return False
    wrong_bytes = abs(recorded.peak_bytes - predicted.peak_bytes)
    is_shorter = recorded.compute_ns < (1 - _MISTAKEN_TIME) * predicted.compute_ns
    return is_shorter or wrong_bytes > _MISTAKEN_PEAK * recorded.peak_bytes


class StepTally:
    """The counts of one plan book. `made` includes the `tightened` plans."""

    def __init__(self) -> None:
        self.made = 0
        self.tightened = 0
        self.improved = 0
        self.recordings = 0
        self._counts: Counter[Followed] = Counter()
        self._last: Followed | None = None
        self._is_recorded = False
        self._choice: tuple[PlanTable, Executor] | None = None  # of the running step

    def recorded(self) -> None:
        """Notes that the running step was recorded."""
        self.recordings += 1
        self._is_recorded = True

    def made_one(self) -> None:
        """Counts a plan that was made."""
        self.made += 1

    def improved_one(self) -> None:
        """Counts a better plan, which was found beside the training."""
        self.improved += 1

    @property
    def changes(self) -> int:
        """The number of plans that were made or improved."""
        return self.made + self.improved

    def made_again(self) -> None:
        """Counts a plan that was made again for less memory."""
        self.made += 1
        self.tightened += 1

    def chose(self, table: PlanTable, sized_plan: SizedPlan) -> None:
        """Notes that the running step follows this plan."""
        self._choice = table, sized_plan.executor

    def ended(self, first: SaveKey | None, table: PlanTable | None) -> None:
        """Counts the finished step, which began with `first` and is of the kind of `table`."""
        self._last = self._followed(first, table)
        self._counts[self._last] += 1
        self._is_recorded, self._choice = False, None

    def _followed(self, first: SaveKey | None, table: PlanTable | None) -> Followed:
        if self._choice is None:
            return Followed.RECORDED if self._is_recorded else Followed.UNPLANNED
        chosen, executor = self._choice
        if chosen is not table:
            return Followed.ANOTHER_KIND
        if executor.has_grown:
            return Followed.OUTGREW
        planned = executor.first_key
        is_own = first is not None and planned is not None and first.size == planned.size
        return Followed.OWN_SIZE if is_own else Followed.LARGER_SIZE

    def plan_use(self, tables: Iterable[PlanTable]) -> PlanUse:
        """The counts, with the plans of these plan tables."""
        plans = tuple(
            _summary_of(number, sized_plan) for number, table in enumerate(tables, 1) for sized_plan in table.plans
        )
        counts = tuple(StepCount(one, self._counts[one]) for one in Followed if self._counts[one])
        return PlanUse(plans, self.recordings, self.made, self.tightened, counts, self._last)


def _summary_of(kind: int, sized_plan: SizedPlan) -> PlanSummary:
    offloaded_bytes = sized_plan.executor.plan.offloaded_bytes
    return PlanSummary(
        kind, sized_plan.first, sized_plan.nbytes, offloaded_bytes, float(sized_plan.slowdown), sized_plan.steps
    )
