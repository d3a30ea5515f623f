"""Checks the claims about vdnn against the cells of a run: each held or not, or not asked, with its figures.

    python -m benchmarks.claims RUN

Claims of two kinds: promises (what is ours runs, has plain's gradients, and keeps its budget), one of which that does
not hold is BROKEN, and aims (how fast, how little, how well predicted), which are missed. Only a broken promise makes
the exit code 1. Reads the cells of one run (docs/benchmarks.md) and, if present, the timelines of its steps and the
probed link. A peer is compared with vdnn on the same workload, batch and place, eager with eager and compiled with
compiled, at the peer's peak or less. All memory is in requested bytes, which sessions count: an allocator rounds them
up. This program measures nothing.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from vdnn.report.cell import FAILED, NOT_RUN, OK, Cell
from vdnn.report.run_folder import CELLS_FILE, read_cells
from vdnn.step.json_lines import read_json_lines
from vdnn.step.timeline import Timeline, Track

# Where a place has no count of requested bytes, its allocator's counts: a peak within this factor counts as the same.
SAME_PEAK = 1.005
# Measured times of two processes differ by this much even if they do the same. Virtual times do not.
NOISE = 0.01
LESS_MEMORY, LITTLE_TIME = 2 / 3, 0.03
PEAK_ERROR, TIME_ERROR = 0.005, 0.05
LONG_COPY_BYTES, FULL_RATE = 16 << 20, 0.95

Group = tuple[str, int | None, str | None, bool]  # workload, batch, place, compiled


@dataclass(frozen=True, slots=True)
class Claim:
    """The verdict on one claim. `held` is None if no cell tests it."""

    name: str
    held: bool | None
    said: str
    is_promise: bool = False

    @property
    def is_broken(self) -> bool:
        return self.is_promise and self.held is False

    def __str__(self) -> str:
        verdict = {True: "held", False: "BROKEN" if self.is_promise else "missed", None: "not asked"}[self.held]
        return f"{verdict:9}  {self.name}: {self.said}"


def is_ours(cell: Cell) -> bool:
    return cell.peer.startswith("vdnn")


def is_refused(cell: Cell) -> bool:
    """True if the budget is below the least that any plan reaches, which vdnn refuses before anything runs."""
    return cell.status == FAILED and "cannot be met" in cell.said


class Ran(NamedTuple):
    """A cell that ran, with its figures. `peak_bytes` are the requested ones, if the place counts those."""

    cell: Cell
    step_ns: int
    peak_bytes: int

    @property
    def is_ours(self) -> bool:
        return is_ours(self.cell)


def _ran(cells: Iterable[Cell]) -> list[Ran]:
    return [
        Ran(cell, cell.step_ns, cell.requested_bytes or cell.peak_bytes)
        for cell in cells
        if cell.status == OK and cell.step_ns and cell.peak_bytes
    ]


def _grouped(cells: Iterable[Cell]) -> dict[Group, list[Ran]]:
    groups: dict[Group, list[Ran]] = defaultdict(list)
    for one in _ran(cells):
        cell = one.cell
        groups[cell.workload, cell.batch, cell.place, cell.compiled].append(one)
    return groups


def _plain(group: Iterable[Ran]) -> Ran | None:
    return next((one for one in group if one.cell.is_plain), None)


def never_slower_than_a_peer(cells: Sequence[Cell]) -> Claim:
    """At the peak of every peer, one of our cells takes no more memory and no more time."""
    met, broken = 0, []
    for (workload, *_), group in _grouped(cells).items():
        plain = _plain(group)
        if plain is None:
            continue
        noise = 0.0 if plain.cell.clock == "virtual" else NOISE
        for peer in group:
            if peer is plain or peer.is_ours:
                continue
            ours = [one for one in group if one.is_ours and one.peak_bytes <= peer.peak_bytes * SAME_PEAK]
            least_ns = min((one.step_ns for one in ours), default=None)
            if least_ns is not None and least_ns <= peer.step_ns + noise * plain.step_ns:
                met += 1
                continue
            found = "nothing of ours is as low" if least_ns is None else f"ours {least_ns / plain.step_ns - 1:+.1%}"
            peer_slowdown = peer.step_ns / plain.step_ns - 1
            broken.append(f"{workload}, {peer.cell.peer} ({peer_slowdown:+.1%}, {_share(peer, plain)}): {found}")
    if not met and not broken:
        return Claim("no peer is faster at its own peak", None, "no peer ran beside plain")
    said = f"{met} of {met + len(broken)} meetings" + "".join(f"; {one}" for one in broken)
    return Claim("no peer is faster at its own peak", not broken, said)


def a_third_less_for_little(cells: Sequence[Cell]) -> Claim:
    found = []
    asked = False
    for (workload, *_), group in _grouped(cells).items():
        plain = _plain(group)
        if plain is None:
            continue
        for one in group:
            if not one.is_ours:
                continue
            asked = True
            is_little = one.step_ns <= (1 + LITTLE_TIME) * plain.step_ns
            if is_little and one.peak_bytes <= LESS_MEMORY * plain.peak_bytes:
                found.append((one.peak_bytes / plain.peak_bytes, one.step_ns / plain.step_ns - 1, workload))
    best = {workload: (share, slowdown) for share, slowdown, workload in sorted(found, reverse=True)}
    said = "; ".join(f"{workload} {share:.0%} at {slowdown:+.1%}" for workload, (share, slowdown) in best.items())
    return Claim("a third less memory at 3 % or less", bool(found) if asked else None, said or "none")


def same_gradients(cells: Sequence[Cell]) -> Claim:
    compared = [cell for cell in cells if is_ours(cell) and cell.identical is not None]
    wrong = [cell for cell in compared if not cell.identical]
    said = f"{len(compared) - len(wrong)} of {len(compared)}" + "".join(f"; not {_title(cell)}" for cell in wrong)
    return Claim("gradients are the plain ones", not wrong if compared else None, said, is_promise=True)


def ours_run(cells: Sequence[Cell]) -> Claim:
    ours = [cell for cell in cells if is_ours(cell) and cell.status != NOT_RUN and not is_refused(cell)]
    failed = [cell for cell in ours if cell.status != OK]
    said = f"{len(ours) - len(failed)} of {len(ours)}"
    said += "".join(f"; {_title(cell)}: {cell.status}, {cell.said}" for cell in failed)
    return Claim("what is ours ran", not failed if ours else None, said, is_promise=True)


def budgets_kept(cells: Sequence[Cell]) -> Claim:
    budgets = [(one, one.cell.budget_bytes) for one in _ran(cells) if one.is_ours and one.cell.budget_bytes]
    over = [(one, budget_bytes) for one, budget_bytes in budgets if one.peak_bytes > SAME_PEAK * budget_bytes]
    said = f"{len(budgets) - len(over)} of {len(budgets)}"
    said += "".join(f"; {_title(one.cell)}: {one.peak_bytes} for {budget_bytes}" for one, budget_bytes in over)
    return Claim("budgets are kept", not over if budgets else None, said, is_promise=True)


def predicted(cells: Sequence[Cell], measured: str, predicted: str, most: float) -> Claim:
    errors = [
        (abs(getattr(cell, predicted) / getattr(cell, measured) - 1), _title(cell))
        for cell in cells
        if cell.is_measured and is_ours(cell) and getattr(cell, predicted) and getattr(cell, measured)
    ]
    name = f"{measured} is as predicted within {most:.1%}"
    if not errors:
        return Claim(name, None, "nothing was predicted")
    within = sum(error <= most for error, _ in errors)
    worst, title = max(errors)
    median = statistics.median(error for error, _ in errors)
    return Claim(
        name, within == len(errors), f"{within} of {len(errors)}; median {median:.2%}, worst {worst:.2%}: {title}"
    )


def engines_at_full_rate(run: Path, cells: Sequence[Cell]) -> Claim:
    """Compare the time of long copies with what the probed link takes for as many bytes, in blocks of their size."""
    name = f"copy engines run at {FULL_RATE:.0%} of the probed rate"
    link = run / "link.jsonl"
    if not link.is_file():
        return Claim(name, None, "no link was probed")
    rows = sorted(read_json_lines(link).values, key=lambda row: int(row["block_bytes"]))
    shares = []
    for cell in cells:
        path = run / "steps" / str(cell.step) / "measured.json"
        if cell.is_measured and cell.step and path.is_file():
            timeline = Timeline.load(path)
            for track, rate in _RATES.items():
                copies = [copy for copy in timeline.copies if copy.track is track and copy.nbytes >= LONG_COPY_BYTES]
                busy_ns = sum(copy.end_ns - copy.begin_ns for copy in copies)
                if busy_ns:
                    due_ns = sum(copy.nbytes * 1e9 / _row_for(rows, copy.nbytes)[rate] for copy in copies)
                    shares.append((due_ns / busy_ns, f"{_title(cell)} {track.value}"))
    if not shares:
        return Claim(name, None, "no long copy was timed")
    worst, title = min(shares)
    median = statistics.median(share for share, _ in shares)
    both = rows[-1]["both_ways_bytes_per_s"] / sum(rows[-1][rate] for rate in _RATES.values())
    said = (
        f"median {median:.1%}, lowest {worst:.1%} ({title}); both ways at once the link itself has {both:.1%} of each"
    )
    return Claim(name, median >= FULL_RATE * min(1.0, both), said)


_RATES = {Track.TO_HOST: "to_host_bytes_per_s", Track.TO_DEVICE: "to_device_bytes_per_s"}


def _row_for(rows: Sequence[dict[str, Any]], nbytes: int) -> dict[str, Any]:
    """The probed row of the largest block that is not larger, for smaller blocks are slower; else the smallest."""
    return next((row for row in reversed(rows) if row["block_bytes"] <= nbytes), rows[0])


def claims_of(run: Path) -> list[Claim]:
    cells = read_cells(run / CELLS_FILE)
    return [
        ours_run(cells),
        same_gradients(cells),
        budgets_kept(cells),
        never_slower_than_a_peer(cells),
        a_third_less_for_little(cells),
        predicted(cells, "requested_bytes", "predicted_peak_bytes", PEAK_ERROR),
        predicted(cells, "step_ns", "predicted_step_ns", TIME_ERROR),
        engines_at_full_rate(run, cells),
    ]


def _title(cell: Cell) -> str:
    budget = f" at {cell.budget}" if cell.budget else ""
    return f"{cell.workload} {cell.peer}{budget}"


def _share(cell: Ran, plain: Ran) -> str:
    return f"{cell.peak_bytes / plain.peak_bytes:.0%} of the memory"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.claims", description=__doc__.split("\n")[0])
    parser.add_argument("run", type=Path, metavar="RUN", help="a folder that benchmarks.sweep wrote")
    options = parser.parse_args(arguments)
    if not (options.run / CELLS_FILE).is_file():
        print(f"claims: expected a run with cells.jsonl in it, got {options.run}.", file=sys.stderr)
        return 2
    claims = claims_of(options.run)
    print("\n".join(map(str, claims)))
    return 1 if any(claim.is_broken for claim in claims) else 0


if __name__ == "__main__":
    sys.exit(main())
