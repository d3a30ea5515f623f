"""The matrix of plans: computes a small corner of it, reads it back and continues it."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.plans import plan_growth, plan_matrix
from benchmarks.plans.plan_cell import PlanCell, append_plan_cells, read_plan_cells
from vdnn.step.json_form import FormatError


@pytest.mark.slow
def test_a_corner_is_as_predicted_and_nobody_is_faster_than_auto(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "deep" / "cells.jsonl"
    wanted = [
        str(results),
        "--networks",
        "unet",
        "--hardware",
        "titan-x",
        "--policies",
        "auto,keep,vdnn-all,prefix-cut",
    ]
    assert plan_matrix.main([*wanted, "--run", "auto,vdnn-all"]) == 0
    cells = read_plan_cells(results)
    assert len(cells) == 4 * len(plan_matrix.SHARES)
    for cell in cells:
        if cell.policy in ("auto", "vdnn-all"):
            assert cell.is_as_predicted
        if cell.policy == "auto":
            assert cell.fits
            assert 0 < cell.bound_ns <= cell.step_ns
        (auto,) = (one for one in cells if one.share == cell.share and one.policy == "auto")
        assert not cell.fits or auto.step_ns <= cell.step_ns
    said = capsys.readouterr().out
    assert "10 of 10 steps as predicted" in said
    assert "Certified gap of auto over 5 cells" in said
    before = results.read_text()
    results.write_text(before + '{"network": "unet", "ha')  # cut off in the middle
    assert plan_matrix.main(wanted) == 0
    assert len(read_plan_cells(results)) == len(cells), "what is there is not done again"


def test_costs_gone_wrong_are_wrong_by_a_fifth_at_most() -> None:
    recording = plan_matrix.rehearse(
        plan_matrix.subject_of(*plan_matrix.NETWORKS["alexnet_128"]), plan_matrix.load_profile("titan-x")
    ).recording
    costs = plan_matrix.profile_costs(plan_matrix.load_profile("titan-x"))
    wrong, wrong_costs = plan_matrix.costs_gone_wrong(recording, costs)
    ratios = [
        one.compute_ns / other.compute_ns
        for one, other in zip(wrong.points, recording.points, strict=True)
        if other.compute_ns > 1000
    ]
    assert min(ratios) < 0.9 < 1.1 < max(ratios)
    assert all(0.79 < ratio < 1.21 for ratio in ratios)
    assert wrong_costs != costs


def test_an_unknown_network_is_answered_with_the_list(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="expected networks among alexnet_128"):
        plan_matrix.main([str(tmp_path / "x"), "--networks", "alexnot"])


def test_a_cell_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "cells.jsonl"
    asked = PlanCell(network="unet", batch=8, hardware="h100", policy="auto", share=0.0, budget_bytes=5)
    cells = [asked, replace(asked, fits=True, keep_ns=100, step_ns=110, bound_ns=105, regret=0.0)]
    append_plan_cells(path, cells)
    assert read_plan_cells(path) == cells
    assert [cell.slowdown for cell in cells] == [math.inf, 1.1]
    assert [cell.certified_gap for cell in cells] == [None, 110 / 105 - 1]
    path.write_text('{"network": "unet"}\n')
    with pytest.raises(FormatError, match="cells.jsonl, line 1: expected the fields of a PlanCell"):
        read_plan_cells(path)


def test_the_growth_of_planning_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan_growth.main(["40", "80"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"^40 +81 ", said, re.MULTILINE)
    recording = plan_growth.long_chain(40)
    assert recording == plan_growth.long_chain(40)
    assert recording.points[-2].allocated_bytes == recording.lifetimes[0].nbytes
