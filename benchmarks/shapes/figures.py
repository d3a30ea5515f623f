"""The figures of a case: its steps beside their own plans and beside everything kept, and what is made of them.

They are plain values that a JSON file holds, so that two versions of vdnn can be compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.shapes.cases import Size

# Ratios of sums leave out the first steps, in which a session learns. Two sessions are compared from an earlier step.
LEARNING_STEPS = 5
LEARNING_STEPS_BESIDE = 3


@dataclass(frozen=True, slots=True)
class Executed:
    """One step in virtual time."""

    step_ns: int
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class StepFigures:
    """A step of a case: as trained under the budget, with everything kept, and its size alone under its own plan."""

    size: Size
    is_first_of_structure: bool
    trained: Executed
    kept: Executed
    alone: Executed

    @property
    def over_own_plan(self) -> float:
        return self.trained.step_ns / self.alone.step_ns


@dataclass(frozen=True, slots=True)
class CaseFigures:
    """`moved_bytes_alone`: the most that an own plan offloads; `planned_bytes`: that a plan of the training offloads.
    `wall_s`: the time of the training on this machine. `planning_s`: processor time in which it waited for plans.
    `one_session_ns`: the steps in one session around all, if each had a session of its own."""

    name: str
    budget_bytes: int
    steps: tuple[StepFigures, ...]
    pinned_bytes: int
    moved_bytes_alone: int
    plans: int
    wall_s: float
    one_session_ns: tuple[int, ...] | None = None
    pinned_at_end_bytes: int | None = None
    planned_bytes: int | None = None
    planning_s: float | None = None

    @property
    def step_s(self) -> float:
        """Virtual time of all steps."""
        return _times([step.trained for step in self.steps]) / 1e9

    @property
    def waiting_share(self) -> float | None:
        """Processor time of planning over the virtual time of all steps. None in the figures of an older version."""
        return None if self.planning_s is None else self.planning_s / self.step_s

    @property
    def over_budget(self) -> list[StepFigures]:
        return [step for step in self.steps if step.trained.peak_bytes > self.budget_bytes]

    @property
    def largest_share(self) -> float:
        """The largest peak over the budget."""
        return max(step.trained.peak_bytes for step in self.steps) / self.budget_bytes

    @property
    def over_own_plans(self) -> float:
        later = self.steps[LEARNING_STEPS:]
        return _times([step.trained for step in later]) / _times([step.alone for step in later])

    @property
    def over_kept(self) -> float:
        later = self.steps[LEARNING_STEPS:]
        return _times([step.trained for step in later]) / _times([step.kept for step in later])

    @property
    def worst_step(self) -> float:
        return max((step.over_own_plan for step in self.steps if not step.is_first_of_structure), default=0.0)

    @property
    def worst_first_step(self) -> float:
        """The slowest of the first steps of all structures."""
        return max(step.over_own_plan for step in self.steps if step.is_first_of_structure)

    @property
    def pinned_over_moved(self) -> float | None:
        """None if no own plan moves anything."""
        return self.pinned_bytes / self.moved_bytes_alone if self.moved_bytes_alone else None

    @property
    def pinned_at_end(self) -> float | None:
        """Over what plans move. None if they move nothing, or in the figures of an older version."""
        return (
            self.pinned_at_end_bytes / self.planned_bytes if self.pinned_at_end_bytes and self.planned_bytes else None
        )

    @property
    def over_one_session(self) -> float | None:
        if self.one_session_ns is None:
            return None
        later = self.steps[LEARNING_STEPS_BESIDE:]
        return _times([step.trained for step in later]) / sum(self.one_session_ns[LEARNING_STEPS_BESIDE:])

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, read: dict[str, Any]) -> CaseFigures:
        steps = tuple(
            StepFigures(
                size=tuple(step["size"]),
                is_first_of_structure=step["is_first_of_structure"],
                trained=Executed(**step["trained"]),
                kept=Executed(**step["kept"]),
                alone=Executed(**step["alone"]),
            )
            for step in read["steps"]
        )
        one_session_ns = read["one_session_ns"]
        return cls(**{**read, "steps": steps, "one_session_ns": one_session_ns and tuple(one_session_ns)})


def _times(steps: Sequence[Executed]) -> int:
    return sum(step.step_ns for step in steps)
