"""PlanUse: the plans of a session, and how many of its steps followed which. A value for reports.

It does not say whether the steps kept to the budget: the report of a session has a line of its own for that.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import Enum

from vdnn.step.json_form import load_file, save_text, to_json
from vdnn.step.recording import SaveKey

_FORM, _VERSION = "vdnn plan use", 1


class Followed(Enum):
    """A finished step followed a plan of one of these sizes, or none."""

    OWN_SIZE = "of their own size"
    LARGER_SIZE = "of a larger size"
    OUTGREW = "of a size that they outgrew"
    ANOTHER_KIND = "of another kind of step"
    RECORDED = "no plan, and was recorded"
    UNPLANNED = "no plan"

    @property
    def is_planned(self) -> bool:
        return self not in (Followed.RECORDED, Followed.UNPLANNED)


@dataclass(frozen=True, slots=True)
class StepCount:
    """The number of finished steps that followed the same."""

    followed: Followed
    steps: int


@dataclass(frozen=True, slots=True)
class PlanSummary:
    """One plan: for the kind of step with this number, and for steps that begin with saves up to the size of `first`.
    `saved_bytes` are those of a step of that size; `slowdown` is the predicted step time as a multiple of the time with
    everything kept; `steps` is how many steps followed the plan."""

    kind: int
    first: SaveKey
    saved_bytes: int
    offloaded_bytes: int
    slowdown: float
    steps: int


@dataclass(frozen=True, slots=True)
class PlanUse:
    """`plans` are those that the session has now, of each kind the smallest first. `made` counts all that it ever made,
    and `tightened` those of them that it made again for less memory, because a step took more than its plan said, or
    more was allocated before it. `last` says which plan the last finished step followed."""

    plans: tuple[PlanSummary, ...]
    recorded: int
    made: int
    tightened: int
    counts: tuple[StepCount, ...]
    last: Followed | None

    @property
    def steps(self) -> int:
        return sum(one.steps for one in self.counts)

    def lines(self) -> tuple[str, ...]:
        """Sentences for reports; nothing before the first step."""
        if not self.steps:
            return ()
        return self._plans_line(), self._steps_line()

    def _plans_line(self) -> str:
        kinds = len({plan.kind for plan in self.plans})
        again = f", {self.tightened} of them again for less memory" if self.tightened else ""
        return (
            f"plans: for {_counted(kinds, 'kind')} of step and {_counted(len(self.plans), 'size')}; {self.made} made"
            f"{again}, from {_counted(self.recorded, 'recorded step')}"
        )

    def _steps_line(self) -> str:
        planned = [one for one in self.counts if one.followed.is_planned]
        number = sum(one.steps for one in planned)
        sizes = ", ".join(f"{one.steps} {one.followed.value}" for one in planned)
        recorded = sum(one.steps for one in self.counts if one.followed is Followed.RECORDED)
        return (
            f"steps: {number} of {self.steps} followed a plan ({100 * number / self.steps:.0f} %)"
            f"{': ' if sizes else ''}{sizes}; {self.steps - number} ran without one ({recorded} recorded)"
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        save_text(to_json(self, _FORM, _VERSION), path)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> PlanUse:
        return load_file(path, PlanUse, _FORM, _VERSION)


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
