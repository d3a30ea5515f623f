"""Published speeds of training on one GPU, beside the virtual machine's for the same steps.

    python -m benchmarks.published_speeds benchmarks/results/published_speeds.jsonl --row rtx-3090

A line of JSON for each row goes to the file: the published time of a step, and the virtual one without and with figures
by class of operation. Rows that the file already has are not run again. The table reads only the file. "Off by" is the
larger of the two times over the smaller one. The row that calibrated a figure is shown and not judged, and neither are
rows whose published figure cannot be of the step as described.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.progress import Progress
from benchmarks.speeds.rows import ROWS, Row
from benchmarks.speeds.virtual_time import step_ns
from benchmarks.text_table import render_table

# A row that is off by more than this is named below the table.
WORST = 1.5


@dataclass(frozen=True, slots=True)
class Speed:
    """The times of one row's step in nanoseconds. `before_ns` is with one efficiency for the whole card."""

    key: str
    published_ns: int
    before_ns: int
    after_ns: int
    is_calibration: bool

    @property
    def before(self) -> float:
        return self.before_ns / self.published_ns

    @property
    def after(self) -> float:
        return self.after_ns / self.published_ns


def off_by(ratio: float) -> float:
    return max(ratio, 1 / ratio)


def measured(row: Row) -> Speed:
    published_ns = round(row.batch / row.per_s * 1e9)
    return Speed(row.key, published_ns, step_ns(row, plain=True), step_ns(row), row.is_calibration)


def read_speeds(path: Path) -> dict[str, Speed]:
    """The rows of the file by their keys, without those whose published figure has changed since."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    speeds = (Speed(**json.loads(line)) for line in lines)
    published = {row.key: round(row.batch / row.per_s * 1e9) for row in ROWS}
    return {one.key: one for one in speeds if published.get(one.key) == one.published_ns}


def judged(speeds: Iterable[Speed]) -> list[Speed]:
    doubtful = _unjudgeable()
    return [one for one in speeds if not one.is_calibration and one.key not in doubtful]


def _unjudgeable() -> dict[str, str]:
    """The reasons of rows that cannot be of the step as described, by key."""
    return {row.key: row.why for row in ROWS if row.is_unjudgeable}


def summary(ratios: Iterable[float]) -> tuple[float, float]:
    """The factors by which the median row and the worst one are off."""
    found = [off_by(ratio) for ratio in ratios]
    return statistics.median(found), max(found)


def far_off(speeds: Iterable[Speed]) -> list[Speed]:
    """The judged rows that are off by more than WORST, the worst first."""
    return sorted((one for one in judged(speeds) if off_by(one.after) > WORST), key=lambda one: -off_by(one.after))


def explained(speeds: Iterable[Speed]) -> dict[str, str]:
    """The reasons of rows that are far off, by key. A row without a known reason has an empty text."""
    reasons = {row.key: row.why for row in ROWS}
    return {one.key: reasons[one.key] for one in far_off(speeds)}


def render(speeds: Sequence[Speed]) -> str:
    header = ("card: network, batch, precision", "published", "before", "ratio", "now", "ratio", "judged")
    shown_as_judged = judged(speeds)
    rows = [
        (
            one.key,
            *(f"{one.published_ns / 1e6:.1f} ms", f"{one.before_ns / 1e6:.1f} ms", f"{one.before:.2f}"),
            *(f"{one.after_ns / 1e6:.1f} ms", f"{one.after:.2f}", "yes" if one in shown_as_judged else "no"),
        )
        for one in speeds
    ]
    return render_table("Published speeds, and the virtual machine's", header, rows, tuple(_remarks(speeds)))


def _remarks(speeds: Sequence[Speed]) -> Iterable[str]:
    rows = judged(speeds)
    if not rows:
        return
    (before, worst_before), (after, worst_after) = (
        summary(one.before for one in rows),
        summary(one.after for one in rows),
    )
    yield f"Before, with one efficiency for each card: median off by {before:.2f} x, worst {worst_before:.2f} x."
    yield f"Now, by class of operation: median off by {after:.2f} x, worst {worst_after:.2f} x, of {len(rows)} rows."
    for card in sorted({one.key.partition(":")[0] for one in rows}):
        of_card = [one for one in rows if one.key.startswith(f"{card}:")]
        before, after = summary(one.before for one in of_card)[0], summary(one.after for one in of_card)[0]
        yield f"{card}, {len(of_card)} rows: median {before:.2f} x before, {after:.2f} x now."
    reasons = explained(rows)
    for why in sorted(set(reasons.values()), reverse=True):
        keys = "; ".join(key for key, reason in reasons.items() if reason == why)
        yield f"Off by more than {WORST} x: {keys}: {why or 'unexplained'}."
    yield from _remarks_on_the_unjudgeable(speeds)


def _remarks_on_the_unjudgeable(speeds: Sequence[Speed]) -> Iterable[str]:
    reasons = _unjudgeable()
    for why in sorted(set(reasons.values())):
        found = [one for one in speeds if reasons.get(one.key) == why]
        if found:
            worst = summary(one.after for one in found)[1]
            yield f"Not judged, off by up to {worst:.2f} x: {'; '.join(one.key for one in found)}: {why}."


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Published speeds of training, beside the virtual machine's.")
    parser.add_argument("path", type=Path, help="the file of results, which is continued")
    parser.add_argument("--row", action="append", default=[], help="only rows whose key has this text; may be repeated")
    parser.add_argument("--table", type=Path, help="write the table to this file too")
    options = parser.parse_args(arguments)
    asked = [row for row in ROWS if not options.row or any(part in row.key for part in options.row)]
    if not asked:
        parser.error(f"--row: no row has {options.row}: a row is named as in {ROWS[0].key!r}.")
    speeds = read_speeds(options.path)
    missing = [row for row in asked if row.key not in speeds]
    progress = Progress("published speeds", len(missing))
    options.path.parent.mkdir(parents=True, exist_ok=True)
    for row in missing:
        progress.begin(row.key)
        speeds[row.key] = measured(row)
        _write(options.path, speeds)
    progress.end()
    table = render([speeds[row.key] for row in asked])
    print(table)
    if options.table is not None:
        options.table.write_text(table + "\n", encoding="utf-8")
    return 0


def _write(path: Path, speeds: dict[str, Speed]) -> None:
    """Replaces the file, in the order of ROWS."""
    lines = [json.dumps(asdict(speeds[row.key])) for row in ROWS if row.key in speeds]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
