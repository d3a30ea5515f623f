"""The plans of one kind of step: a ladder, which has a rung for each planned size. Decides when a recorded step needs a
new rung, and counts for the report which plans steps followed.

A plan serves every step of its kind that is not larger, because such a step takes no more memory at any point. So a
step follows the lowest rung that serves it. If no rung is known to serve it, it follows the highest one, and a guard
makes room for larger storages. A far larger step follows no rung. Sizes that were not recorded get rungs from predicted
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
from vdnn.runtime.steps.size_model import RecordedSizes
from vdnn.step.forms import is_within
from vdnn.step.made_steps import first_point, first_save
from vdnn.step.plan import Action
from vdnn.step.plan_use import Followed, PlanUse, SizePlan, StepCount
from vdnn.step.recording import Recording, SaveKey
from vdnn.step.timeline import Timeline

# A rung serves steps down to this share of its size well, and any step if it slows down by no more than `_FREE`. One
# that slows down by more than `_CHEAP` is worth recording a smaller step for.
_NEAR = 0.95
_FREE = 1.005
_CHEAP = 1.1
# A step follows no rung that would have to be this many times as large.
_FAR = 1.5
# The most rungs, and sizes of first saves that one rung remembers.
_MOST_RUNGS = 16
_MOST_SIZES = 64
_MOST_REPLACED = 4


class RungOrigin(Enum):
    """The kind of recordings that a rung was planned from."""

    RECORDED = "a recorded step"
    WARM_UP = "a recorded step of the warm-up"
    MADE = "steps of other sizes"
    GUESSED = "one step of another size"


class Rung:
    """A plan that vdnn made, and what it was made from."""

    def __init__(
        self,
        planned: PlannedStep,
        recording: Recording,
        timeline: Timeline | None,
        origin: RungOrigin = RungOrigin.RECORDED,
    ) -> None:
        self.timeline = timeline
        self.origin = origin
        self.tightened_bytes = 0
        self.tightenings = 0
        self.steps = 0  # that followed it
        self.has_warned = False
        self.misfit_steps = 0  # until when steps are recorded, because one differed from it and exceeded the budget
        self.is_over_somewhere = False  # no plan met the budget with what was resident
        self.is_stored = False  # an earlier run made it
        self._served: list[SaveKey] = []  # first saves of larger steps that it served
        self._roomier: tuple[Recording, PlannedStep] | None = None  # before more was resident
        self._planned = planned
        self.follow(recording, planned)

    def follow(self, recording: Recording, planned: PlannedStep) -> None:
        """From now on the steps of this rung follow this plan."""
        self.recording, self._planned = recording, planned
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
        self.peak_bytes = planned.timeline.peak_bytes

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

    def least_bytes(self, resident_bytes: int) -> int:
        """The smallest budget that the rung's step can meet with `resident_bytes` allocated at its begin."""
        if self._least_bytes is None:
            self._least_bytes = least_bytes(self.recording)
        return self._least_bytes + resident_bytes - self.recording.resident_bytes

    @property
    def is_provisional(self) -> bool:
        """True if the next step is recorded for a better plan. A guess that costs nothing stays."""
        return self.origin is RungOrigin.WARM_UP or (self.origin is RungOrigin.GUESSED and self.slowdown > _FREE)

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
        """The first saves of larger steps that the rung served."""
        return tuple(self._served)

    def served(self, first: SaveKey) -> None:
        """Notes that a step with this first save followed the rung and was not larger."""
        if not self.serves(first):
            larger = [one for one in self._served if not is_within(one, first)]
            self._served = [*larger, first][-_MOST_SIZES:]


class Ladder:
    """The rungs of one kind, the lowest first."""

    def __init__(self, recorded: RecordedSizes) -> None:
        self.recorded = recorded
        self.rungs: list[Rung] = []
        self.last_used = 0
        self.replaced = 0  # rungs that did not fit
        # Recorded with other training state on the device: steps take so many bytes more than are there as they begin.
        self.is_of_other_state = False
        self.more_bytes = 0
        self.records_all = False  # the first save does not tell the size of a step: those that follow are recorded

    def choose(self, first: SaveKey) -> Rung | None:
        """The rung that is known to serve a step that begins with this save."""
        rungs = reversed(self.rungs) if self.records_all else self.rungs
        return next((rung for rung in rungs if rung.serves(first)), None)

    def is_far_below(self, first: SaveKey) -> bool:
        """True if a step with this first save is so much larger than every rung that following one is worse than
        following none."""
        return math.prod(first.size) > _FAR * math.prod(self.rungs[-1].first.size)

    def deserves_own(self, rung: Rung, first: SaveKey) -> bool:
        """True if the plan of this rung is so slow that a step far below it gets one of its own."""
        return rung.slowdown > _CHEAP and rung.is_far_above(first) and len(self.rungs) < _MOST_RUNGS

    @property
    def may_replace(self) -> bool:
        """True if a rung that does not fit may still be replaced. The number is bounded: steps that alternate would
        otherwise cause a new plan in each step."""
        return self.replaced < _MOST_REPLACED

    def find_near(self, first: SaveKey, recording: Recording) -> bool:
        """True if a rung serves a recorded step well, so that it needs none of its own."""
        nbytes = recording.managed_bytes
        return any(rung.serves(first) and _NEAR * rung.nbytes <= nbytes <= rung.nbytes for rung in self.rungs)

    def rung_of(self, executor: Executor) -> Rung | None:
        """The rung that has this executor."""
        return next((one for one in self.rungs if one.executor is executor), None)

    def highest_without(self, wrong: Rung | None) -> Rung | None:
        """The highest rung, ignoring `wrong` and the guesses made beside it."""
        rungs = self._without(wrong)
        return rungs[-1] if rungs else None

    def replace(self, wrong: Rung | None, rung: Rung) -> None:
        """Removes the wrong rung, and adds another one."""
        self.rungs = self._without(wrong)
        self.add(rung)

    def _without(self, wrong: Rung | None) -> list[Rung]:
        """The rungs without a wrong one. If there is a wrong one, guesses are left out, too."""
        if wrong is None:
            return self.rungs
        return [one for one in self.rungs if one is not wrong and one.origin is not RungOrigin.GUESSED]

    def add(self, rung: Rung) -> None:
        """Adds a rung. Of rungs with first saves of one size only the highest remains, because the first save of a step
        cannot tell them apart."""
        alike = [one for one in self.rungs if one.first.size == rung.first.size]
        if any(one.nbytes > rung.nbytes for one in alike):
            return
        self.rungs = sorted([*(one for one in self.rungs if one not in alike), rung], key=lambda one: one.nbytes)
        if len(self.rungs) > _MOST_RUNGS:
            self.rungs.remove(min(self.rungs[:-1], key=lambda one: one.steps))


# A step that is larger than its plan by no more than this is not planned anew: its guard balances that.
_TOLERANCE = 1.01
# What recorded steps told of another one was mistaken if its peak is off by this share, or its time shorter by that.
_MISTAKEN_PEAK = 0.01
_MISTAKEN_TIME = 0.05


def needs_plan(ladder: Ladder, rung: Rung | None, recording: Recording, *, is_planned: bool, has_grown: bool) -> bool:
    """True if a recorded step had no plan of its size, or was larger than its plan, or so much smaller that it gets a
    plan of its own. `rung`: the rung of its kind that it followed."""
    first = first_save(recording)
    if not is_planned:
        return not ladder.find_near(first, recording)
    if rung is None:
        return False  # it followed a plan of another kind, and its own has some
    if has_grown:
        return recording.managed_bytes > _TOLERANCE * rung.nbytes
    rung.served(first)
    return ladder.deserves_own(rung, first)


def is_mistaken(rung: Rung, predicted: Recording | None, recorded: Recording) -> bool:
    """True if a step that followed this rung took other memory or time than predicted."""
    if predicted is None or rung.origin is RungOrigin.RECORDED:
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
        self._choice: tuple[Ladder, Executor] | None = None  # of the running step

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

    def chose(self, ladder: Ladder, rung: Rung) -> None:
        """Notes that the running step follows this rung."""
        self._choice = ladder, rung.executor

    def ended(self, first: SaveKey | None, ladder: Ladder | None) -> None:
        """Counts the finished step, which began with `first` and is of the kind of this ladder."""
        self._last = self._followed(first, ladder)
        self._counts[self._last] += 1
        self._is_recorded, self._choice = False, None

    def _followed(self, first: SaveKey | None, ladder: Ladder | None) -> Followed:
        if self._choice is None:
            return Followed.RECORDED if self._is_recorded else Followed.UNPLANNED
        chosen, executor = self._choice
        if chosen is not ladder:
            return Followed.ANOTHER_KIND
        if executor.has_grown:
            return Followed.OUTGREW
        planned = executor.first_key
        is_own = first is not None and planned is not None and first.size == planned.size
        return Followed.OWN_SIZE if is_own else Followed.LARGER_SIZE

    def plan_use(self, ladders: Iterable[Ladder]) -> PlanUse:
        """The counts, with the plans of these ladders."""
        plans = tuple(_size_plan(number, rung) for number, ladder in enumerate(ladders, 1) for rung in ladder.rungs)
        counts = tuple(StepCount(one, self._counts[one]) for one in Followed if self._counts[one])
        return PlanUse(plans, self.recordings, self.made, self.tightened, counts, self._last)


def _size_plan(kind: int, rung: Rung) -> SizePlan:
    offloaded_bytes = rung.executor.plan.offloaded_bytes
    return SizePlan(kind, rung.first, rung.nbytes, offloaded_bytes, float(rung.slowdown), rung.steps)
