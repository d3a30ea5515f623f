"""PlanCell: what one policy plans for one step on one card under one budget. A line of the tables of plans.

Figures are predicted. A field that a table does not ask for keeps its default, and is left out of the file.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vdnn.errors import BudgetError, FormatError
from vdnn.planning.costs import LinkCosts
from vdnn.planning.planned_step import PlannedStep, plan_step
from vdnn.planning.policies import PlanPolicy
from vdnn.step.json_lines import append_json_lines, read_json_lines
from vdnn.step.recording import Recording


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCell:
    """One plan.

    `share` says what the budget is, from the least that any plan reaches (0) to everything kept (1). `row` is the key
    of the published figure that the plan is compared with. `keep_ns` and `keep_bytes` are those of the step with
    everything kept. Without a plan `fits` is False, and `step_ns` and `peak_bytes` are 0. `recomputed_share` is the
    part of the saved bytes that can be recomputed, `regret` the slowdown if the costs are wrong, and `executed_ns` and
    `executed_peak_bytes` those of the same step, run in virtual time.
    """

    network: str
    batch: int
    hardware: str
    policy: str
    share: float | None = None
    row: str | None = None
    budget_bytes: int = 0
    card_bytes: int = 0
    resident_bytes: int = 0
    points: int = 0
    recomputed_share: float = 0.0
    keep_ns: int = 0
    keep_bytes: int = 0
    fits: bool = False
    step_ns: int = 0
    peak_bytes: int = 0
    bound_ns: int = 0
    plan_seconds: float = 0.0
    regret: float | None = None
    executed_ns: int = 0
    executed_peak_bytes: int = 0

    @property
    def slowdown(self) -> float:
        """The step's time as a multiple of the time with everything kept. Infinite without a plan."""
        return self.step_ns / self.keep_ns if self.step_ns else math.inf

    @property
    def certified_gap(self) -> float | None:
        """The largest possible extra time over the shortest step, as a share. None without a bound."""
        return max(0.0, self.step_ns / self.bound_ns - 1) if self.bound_ns else None

    @property
    def is_as_predicted(self) -> bool:
        """True if the step ran as predicted, to the nanosecond and the byte."""
        return (self.executed_ns, self.executed_peak_bytes) == (self.step_ns, self.peak_bytes)


def planned_cell(
    asked: PlanCell, recording: Recording, costs: LinkCosts, planner: str | PlanPolicy, *, certify: bool = False
) -> tuple[PlanCell, PlannedStep | None]:
    """The cell with the figures of the plan, and the plan. None if no plan meets the budget."""
    asked = dataclasses.replace(
        asked, points=len(recording.points), keep_ns=recording.compute_ns, keep_bytes=recording.peak_bytes
    )
    try:
        planned = plan_step(recording, costs, asked.budget_bytes, planner, certify=certify)
    except BudgetError:
        return asked, None
    cell = dataclasses.replace(
        asked,
        fits=planned.fits,
        step_ns=planned.timeline.step_ns,
        peak_bytes=planned.timeline.peak_bytes,
        bound_ns=0 if planned.bound is None else planned.bound.step_ns,
        plan_seconds=round(planned.plan_seconds, 3),
    )
    return cell, planned


def read_plan_cells(path: Path) -> list[PlanCell]:
    return [_cell_from_json(fields, f"{path}, line {number}") for number, fields in read_json_lines(path).found]


def append_plan_cells(path: Path, cells: Iterable[PlanCell]) -> None:
    append_json_lines(path, map(_as_json, cells))


def _as_json(cell: PlanCell) -> dict[str, Any]:
    fields = ((field.name, getattr(cell, field.name), field.default) for field in dataclasses.fields(cell))
    return {name: value for name, value, default in fields if value != default}


def _cell_from_json(fields: Any, where: str) -> PlanCell:
    try:
        return PlanCell(**fields)
    except TypeError as error:
        raise FormatError(where=where, problem=f"expected the fields of a PlanCell: {error}.") from None
