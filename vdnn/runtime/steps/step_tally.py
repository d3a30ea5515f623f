"""Counts what the steps of a session followed, for its report: plans by the size they were made for, or none.

The plan book tells the tally of recordings, plans and choices as they come. The tally decides nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from vdnn.runtime.steps.executor import Executor
from vdnn.runtime.steps.ladder import Ladder, Rung
from vdnn.step.plan_use import Followed, PlanUse, SizePlan, StepCount
from vdnn.step.recording import SaveKey


class StepTally:
    """The counts of one plan book. `made` includes the `tightened` plans."""

    def __init__(self) -> None:
        self.made = 0
        self.tightened = 0
        self.recordings = 0
        self._counts: Counter[Followed] = Counter()
        self._last: Followed | None = None
        self._is_recorded = False
        self._choice: tuple[Ladder, Executor] | None = None  # of the running step

    def recorded(self) -> None:
        """The running step was recorded."""
        self.recordings += 1
        self._is_recorded = True

    def made_one(self) -> None:
        """A plan was made."""
        self.made += 1

    def made_again(self) -> None:
        """A plan was made again for less memory."""
        self.made += 1
        self.tightened += 1

    def chose(self, ladder: Ladder, rung: Rung) -> None:
        """The running step follows this rung."""
        self._choice = ladder, rung.executor

    def ended(self, first: SaveKey | None, ladder: Ladder | None) -> None:
        """The running step began with `first`, and is of the kind that has this ladder."""
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
