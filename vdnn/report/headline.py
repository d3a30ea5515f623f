"""The headline of a run: one sentence, computed from its cells by a rule that the report states.

For each comparison it names one point of vdnn: the one with the least memory among those that take at most 5 % more
time than plain, or the fastest if there is none. With several comparisons the headline is the range over all of them,
so that it picks none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vdnn.bytesize import format_bytes
from vdnn.report.cell import Cell
from vdnn.report.comparison import Comparison

WORTH_IT = 0.05
RULE = (
    f"The named point is the one with the least memory among those within {WORTH_IT:.0%} of plain's time, or the "
    "fastest if there is none."
).replace("%", " %")


@dataclass(frozen=True, slots=True)
class NamedPoint:
    """One point of vdnn, relative to plain."""

    comparison: Comparison
    cell: Cell

    @property
    def memory_share(self) -> float | None:
        return self.comparison.memory_share(self.cell)

    @property
    def more_time(self) -> float | None:
        return self.comparison.more_time(self.cell)

    def __str__(self) -> str:
        share, more = self.memory_share, self.more_time
        name, where = self.comparison.name, self.comparison.where
        if share is not None and more is not None:
            return f"{name}: {share_text(share)} of the memory at {more_time_text(more)} ({where})"
        peak = format_bytes(self.cell.peak_bytes or 0)
        plain = self.comparison.plain
        if plain is not None and plain.status == "out-of-memory":
            return f"{name}: trains in {peak}, where plain PyTorch runs out of memory ({where})"
        return f"{name}: trains in {peak}; plain PyTorch was not run ({where})"


def named_points(compared: Sequence[Comparison]) -> tuple[NamedPoint, ...]:
    """The named point of each comparison. Comparisons of a tiny size count only if there are no others."""
    sized = [comparison for comparison in compared if not comparison.is_tiny] or compared
    found = (named_point_of(comparison) for comparison in sized)
    return tuple(point for point in found if point is not None)


def named_point_of(comparison: Comparison) -> NamedPoint | None:
    own = [cell for cell in comparison.measured if cell.is_vdnn]
    if not own:
        return None
    cheap = [cell for cell in own if (comparison.more_time(cell) or 0) <= WORTH_IT]
    if cheap:
        return NamedPoint(comparison, min(cheap, key=lambda cell: (cell.peak_bytes or 0, cell.step_ns or 0)))
    return NamedPoint(comparison, min(own, key=lambda cell: (cell.step_ns or 0, cell.peak_bytes or 0)))


def headline(compared: Sequence[Comparison]) -> str:
    """The sentence for the whole run."""
    found = named_points(compared)
    if not found:
        return "This run has no measured or predicted step of vdnn."
    if len(found) == 1:
        return f"{found[0]}."
    shares = sorted(one.memory_share for one in found if one.memory_share is not None)
    times = sorted(one.more_time for one in found if one.more_time is not None)
    if not shares:
        return f"{len(found)} workloads train under vdnn; plain PyTorch was run for none of them."
    places = sorted({one.comparison.where for one in found})
    where = places[0] if len(places) == 1 else f"{len(places)} devices"
    if len(places) > 1 and all(one.comparison.is_virtual for one in found):
        where = f"{len(places)} virtual devices"
    alone = len(found) - len(shares)
    beside = f"; {alone} more {'has' if alone == 1 else 'have'} no plain to compare with" if alone else ""
    things = _things(found).removesuffix("s" if len(shares) == 1 else "")
    return (
        f"{len(shares)} {things}: {_range(share_text(shares[0]), share_text(shares[-1]))} of the memory at "
        f"{_range(more_time_text(times[0]), more_time_text(times[-1]))} ({where}){beside}."
    )


def _things(found: Sequence[NamedPoint]) -> str:
    return "workloads" if len({one.comparison.workload for one in found}) == len(found) else "comparisons"


def share_text(share: float) -> str:
    """A share of plain's memory, as in "41 %"."""
    return f"{100 * share:.1f} %" if share < 0.1 else f"{100 * share:.0f} %"


def more_time_text(more: float) -> str:
    percent = 100 * abs(more)
    if percent < 0.05:
        return "no more time"
    shown = f"{percent:.1f} %" if percent < 100 else f"{percent:.0f} %"
    return f"{shown} {'more' if more > 0 else 'less'} time"


def _range(low: str, high: str) -> str:
    if low == high:
        return low
    unit, ending = " %", high.partition(" %")[2]
    if low.endswith(unit + ending):  # "1.2 to 8.7 % more time"
        low = low.removesuffix(unit + ending)
    return f"{low} to {high}"
