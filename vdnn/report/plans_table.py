"""The part of the page about the plans of a session: how many steps followed a plan, and a table by size."""

from __future__ import annotations

from html import escape

from vdnn.report.page_tables import Column, Entry, Row, size, table, words
from vdnn.step.plan_use import PlanUse, SizePlan

_COLUMNS = (
    Column("kind of step", "number"),
    Column("first save, up to", "long"),
    Column("saved", "number"),
    Column("offloaded", "number"),
    Column("predicted slowdown", "number"),
    Column("steps that followed it", "number"),
)


def plans_of_session(use: PlanUse) -> str:
    """Empty before the first step of the session."""
    said = "".join(f"<p>{escape(line[0].upper() + line[1:])}.</p>" for line in use.lines())
    if not said:
        return ""
    rows = [_row(plan) for plan in use.plans]
    return "<h3>The plans of the session</h3>" + said + (table(_COLUMNS, rows, "plans of the session") if rows else "")


def _row(plan: SizePlan) -> Row:
    return Row(
        (
            Entry(str(plan.kind), plan.kind),
            words(str(plan.first)),
            size(plan.saved_bytes),
            size(plan.offloaded_bytes),
            Entry(f"{plan.slowdown:.3f} x", plan.slowdown),
            Entry(str(plan.steps), plan.steps),
        )
    )
