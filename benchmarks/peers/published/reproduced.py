"""Runs published rows in virtual time, and keeps the figures in a file: one line for each way of a training.

vdnn gets one line for each training and card: the plan for the least peak that one of the ways has there. So it has no
more memory than any of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from benchmarks.peers.published.rows import Row
from benchmarks.peers.published.trainings import Training
from benchmarks.peers.published.virtual_step import VirtualStep, recorded, virtual_step
from benchmarks.progress import Progress


class VdnnStep(NamedTuple):
    """vdnn's step under a budget; None if vdnn needs more."""

    budget_bytes: int
    step_ns: int | None


class Figures:
    """All figures that are known, by training, card and way. Adding one writes the file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._steps: dict[str, VirtualStep] = {}
        self._vdnn: dict[str, VdnnStep] = {}
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
            record = json.loads(line)
            key = record.pop("key")
            if "budget_bytes" in record:
                self._vdnn[key] = VdnnStep(**record)
            else:
                self._steps[key] = VirtualStep(**record)

    def step_of(self, row: Row) -> VirtualStep | None:
        return self._steps.get(step_key(row.training, row.card, row.way))

    def vdnn_of(self, row: Row) -> VdnnStep | None:
        return self._vdnn.get(place_key(row.training, row.card))

    def add_step(self, row: Row, step: VirtualStep) -> None:
        self._steps[step_key(row.training, row.card, row.way)] = step
        self._write()

    def add_vdnn(self, row: Row, step: VdnnStep) -> None:
        self._vdnn[place_key(row.training, row.card)] = step
        self._write()

    def _write(self) -> None:
        records = [{"key": key, **asdict(step)} for key, step in sorted(self._steps.items())]
        records += [{"key": key, **step._asdict()} for key, step in sorted(self._vdnn.items())]
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text("".join(json.dumps(one) + "\n" for one in records), encoding="utf-8")


def place_key(training: Training, card: str) -> str:
    return f"{training.key}; {card}"


def step_key(training: Training, card: str, way: str) -> str:
    return f"{place_key(training, card)}; {way}"


def run_missing(rows: Sequence[Row], figures: Figures) -> None:
    """Runs every way of these rows that has no figure, and then vdnn where it has none."""
    ways = {step_key(row.training, row.card, row.way): row for row in rows if figures.step_of(row) is None}
    places = {place_key(row.training, row.card): row for row in rows if figures.vdnn_of(row) is None}
    progress = Progress("peers", len(ways) + len(places))
    for key, row in ways.items():
        progress.begin(key)
        figures.add_step(row, virtual_step(row.training, row.card, row.way))
    for key, row in places.items():
        progress.begin(f"{key}; vdnn")
        budget_bytes = least_peak([one for one in rows if place_key(one.training, one.card) == key], figures)
        figures.add_vdnn(
            row, VdnnStep(budget_bytes, recorded(row.training, row.card).planned_ns(row.card, budget_bytes))
        )
    progress.end()


def least_peak(rows: Iterable[Row], figures: Figures) -> int:
    return min(step.peak_bytes for step in map(figures.step_of, rows) if step is not None)
