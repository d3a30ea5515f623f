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
        if share is None or more is None:
            return f"{name}: {self.without_plain} ({where})"
        return (
            f"{name}: {share_text(share)} of plain PyTorch's memory, and a step takes {time_text(more, more)} ({where})"
        )

    @property
    def without_plain(self) -> str:
        """The sentence for a point that has no plain step beside it."""
        peak, plain = format_bytes(self.cell.peak_bytes or 0), self.comparison.plain
        if plain is not None and plain.status == "out-of-memory":
            return f"trains in {peak}, where plain PyTorch runs out of memory"
        return f"trains in {peak}; plain PyTorch was not run"


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
    beside = [one for one in found if one.memory_share is not None and one.more_time is not None]
    alone = [one for one in found if one not in beside]
    parts = []
    if beside:
        shares = sorted(one.memory_share or 0 for one in beside)
        times = sorted(one.more_time or 0 for one in beside)
        verb = "trains" if len(beside) == 1 else "train"
        share = _range(share_text(shares[0]), share_text(shares[-1]))
        parts.append(
            f"{_named(beside)} {verb} with {share} of the memory of plain PyTorch, and a step takes "
            f"{time_text(times[0], times[-1])}"
        )
    if len(alone) == 1:
        parts.append(f"{_named(alone)} {alone[0].without_plain}")
    elif alone:
        failed = [one for one in alone if "runs out" in one.without_plain]
        if failed:
            parts.append(f"{_named(failed)} train where plain PyTorch runs out of memory")
        if len(failed) < len(alone):
            parts.append(f"plain PyTorch was not run for {_named([one for one in alone if one not in failed])}")
    return f"With vdnn, {'; '.join(parts)} ({_where(found)})."


def _named(points: Sequence[NamedPoint]) -> str:
    """The workload of the point, or how many there are."""
    if len(points) > 1:
        alike = len({one.comparison.workload for one in points}) < len(points)
        return f"{len(points)} {'comparisons' if alike else 'workloads'}"
    comparison = points[0].comparison
    return f"{comparison.workload}{'' if comparison.batch is None else f' (batch {comparison.batch})'}"


def _where(found: Sequence[NamedPoint]) -> str:
    places = sorted({one.comparison.where for one in found})
    if len(places) == 1:
        return places[0]
    virtual = "virtual " if all(one.comparison.is_virtual for one in found) else ""
    return f"{len(places)} {virtual}devices"


def share_text(share: float) -> str:
    """A share of plain's memory, as in "41 %"."""
    return f"{100 * share:.1f} %" if share < 0.1 else f"{100 * share:.0f} %"


def time_text(least: float, most: float) -> str:
    """A range of extra time, as in "2.3 to 8.7 % longer" and "no longer"."""
    low, high = (0.0 if abs(more) < 0.0005 else more for more in (least, most))
    if low == high == 0:
        return "no longer"
    if low == 0:
        return f"up to {_percent(high)} longer"
    if high <= 0:
        fewest, longest = _percent(high), _percent(low)
        return f"{_range(fewest, longest)} less time" if high else f"up to {longest} less time"
    if low < 0:
        return f"between {_percent(low)} less and {_percent(high)} more time"
    return f"{_range(_percent(low), _percent(high))} longer"


def _percent(part: float) -> str:
    percent = 100 * abs(part)
    return f"{percent:.1f} %" if percent < 100 else f"{percent:.0f} %"


def _range(low: str, high: str) -> str:
    """Two percentages, as in "1.2 to 8.7 %"."""
    return low if low == high else f"{low.removesuffix(' %')} to {high}"
