"""The benchmarks of the host lane: what their cells and tables say."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchmarks.plans import host_lane
from benchmarks.plans.host_lane import Cell, read_cells, render
from benchmarks.plans.host_lane_rows import scaled
from tests.planning.recordings import chain, recomputable
from vdnn.step.recording import Recording

CELL = Cell(
    network="a network",
    hardware="a card",
    share=0.5,
    factor=2,
    kept_ns=100,
    device_ns=100,
    without_ns=150,
    with_ns=120,
    host_ns=120,
    without_recomputes=20,
    with_recomputes=3,
    published_ns=130,
    published="largest-first",
    gap=0.05,
    gap_without=0.01,
    seconds=3.0,
    seconds_without=1.0,
)


def test_the_table_counts_what_is_slower_and_names_it() -> None:
    alone = replace(CELL, without_ns=100, with_ns=100, host_ns=80, gap=0.01, published_ns=None, published="")
    slower = replace(CELL, share=0.75, with_ns=160, published_ns=140)
    table = render([CELL, alone, slower])
    assert "x 2        3              2                    1" in table
    assert "40 -> 6" in table
    assert "a network on a card at 0.75, x 2: largest-first is 14.29 % faster." in table
    assert "wider than without the lane by more than 1 % in 0." in " ".join(table.split())
    assert "planning takes 3.0 times as long" in table


def test_cells_are_read_as_they_were_written(tmp_path: Path) -> None:
    (tmp_path / "cells.jsonl").write_text(json.dumps(asdict(CELL)) + "\n")
    assert read_cells(tmp_path / "cells.jsonl") == [CELL]
    assert read_cells(tmp_path / "none.jsonl") == []


def test_a_network_that_the_file_has_is_not_rehearsed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_lane, "rehearse", None)
    keys = {("gpt2", "h200", share, factor) for share in (0.0, 0.25, 0.5, 0.75, 0.9) for factor in (1, 2, 4)}
    assert list(host_lane.cells_of("gpt2", "h200", keys, certify=False)) == []


def test_a_device_that_takes_longer_takes_longer_for_recomputes_too() -> None:
    recording: Recording = recomputable(chain([10, 20], compute_ns=100), 1, (0,), 30)
    slow = scaled(recording, 1.5)
    assert slow.compute_ns == round(1.5 * recording.compute_ns)
    recompute = slow.lifetimes[1].recompute
    assert recompute is not None
    assert recompute.compute_ns == 45
