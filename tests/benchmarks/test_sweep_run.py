"""Sweeps: the order of cells, the meaning of a budget, the recorded fields, and continuing a stopped sweep."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import sweep
from benchmarks.harness.cell_process import Measure
from benchmarks.harness.cell_spec import CellSpec, cell_of
from benchmarks.harness.grid import Grid, quick_grids
from benchmarks.harness.sweep_run import Limits, OutOfTime, SweepRun, is_identical
from vdnn.report.cell import NOT_RUN, OUT_OF_MEMORY, Cell
from vdnn.report.run_folder import CELLS_FILE, read_cells

pytestmark = pytest.mark.slow

PEERS = ("vdnn-auto", "checkpoint", "plain")
GRID = Grid("virtual", "h100", ("unet", "vgg16"), PEERS, ("60%", "12GiB", "min"))
PLAIN_PEAK = 1001


def measured(spec: CellSpec) -> Cell:
    """A result with numbers that can be told apart. `said` is the budget that it was given."""
    gradients = "other" if spec.peer == "checkpoint" else "same"
    return cell_of(
        spec, step_ns=len(spec.peer), peak_bytes=PLAIN_PEAK, gradients=gradients, said=str(spec.budget_bytes)
    )


def out_of_memory(spec: CellSpec) -> Cell:
    if spec.peer != "plain":
        return measured(spec)
    return cell_of(spec, status=OUT_OF_MEMORY, said="CUDA out of memory")


def crashes(spec: CellSpec) -> Cell:
    if spec.peer == "checkpoint":
        os.abort()
    return measured(spec)


def hangs(spec: CellSpec) -> Cell:
    if spec.peer == "checkpoint":
        threading.Event().wait()
    return measured(spec)


def run_of(folder: Path, measure: Measure = measured, *, limit_s: float = 600.0, **options: Any) -> SweepRun:
    limits = Limits(time.monotonic() + limit_s, cell_s=60.0, jobs=1)
    return SweepRun(folder, limits, measure=measure, **options)


def cells_in(folder: Path) -> list[Cell]:
    return read_cells(folder / CELLS_FILE)


def what_ran(cells: list[Cell]) -> list[tuple[str, str, str | None]]:
    return [(cell.workload, cell.peer, cell.budget) for cell in cells]


def test_plain_goes_first_and_budgets_are_shares_of_its_peak(tmp_path: Path) -> None:
    run_of(tmp_path).do([GRID])
    cells = cells_in(tmp_path)
    assert what_ran(cells)[:5] == [
        ("unet", "plain", None),
        ("unet", "vdnn-auto", "60%"),
        ("unet", "vdnn-auto", "12GiB"),
        ("unet", "vdnn-auto", "min"),
        ("unet", "checkpoint", None),
    ]
    assert len(cells) == 2 * 5
    told = {cell.budget: cell.said for cell in cells if cell.peer == "vdnn-auto"}
    assert told == {"60%": str(int(0.6 * PLAIN_PEAK)), "12GiB": str(12 * 2**30), "min": "None"}


def by_process(spec: CellSpec) -> Cell:
    return cell_of(spec, step_ns=os.getpid(), peak_bytes=PLAIN_PEAK)


def test_on_a_gpu_each_cell_has_a_fresh_process_and_none_is_left(tmp_path: Path) -> None:
    """Each process starts while the cell before it runs."""
    run_of(tmp_path, by_process).do([Grid("cuda", "", ("unet",), ("plain", "checkpoint", "vdnn-all"), ())])
    processes = [cell.step_ns for cell in cells_in(tmp_path)]
    assert len(set(processes)) == 3
    assert os.getpid() not in processes
    assert multiprocessing.active_children() == []


def test_a_budget_may_be_what_another_peer_took(tmp_path: Path) -> None:
    """The cell waits for that peer, wherever the peer is in the list. The budget is the requested bytes, not the
    allocated ones."""
    peers = ("vdnn-auto", "vdnn-all", "checkpoint", "save-on-cpu-pageable", "plain")
    grid = Grid("virtual", "h100", ("unet",), peers, ("peers", "60%"))

    def measure(spec: CellSpec) -> Cell:
        if spec.peer == "save-on-cpu-pageable":
            return cell_of(spec, status=NOT_RUN, said="no link")
        found = measured(spec)
        found.requested_bytes = 500 if spec.peer == "checkpoint" else None
        return found

    run_of(tmp_path, measure).do([grid])
    told = {cell.budget: cell for cell in cells_in(tmp_path) if cell.peer == "vdnn-auto"}
    assert set(told) == {"=checkpoint", "=save-on-cpu-pageable", "60%"}
    assert told["=checkpoint"].said == "500"
    assert told["=save-on-cpu-pageable"].status == NOT_RUN
    assert told["=save-on-cpu-pageable"].said.endswith(
        "peak of save-on-cpu-pageable, which is unknown: not-run, no link"
    )
    names = {spec.step_name for spec in grid.specs("unet", None)}
    assert "unet-b8-vdnn-auto-as-checkpoint-virtual-h100" in names


def test_gradients_are_compared_with_plains(tmp_path: Path) -> None:
    run_of(tmp_path).do([GRID])
    found = {cell.peer: cell.identical for cell in cells_in(tmp_path)}
    assert found == {"plain": None, "vdnn-auto": True, "checkpoint": False}


@pytest.mark.parametrize(
    ("gradients", "repeats", "identical"),
    [("a", False, True), ("b", True, False), ("b", None, False), ("b", False, None), (None, None, None)],
)
def test_gradients_that_differ_prove_nothing_where_a_step_does_not_repeat_its_own(
    gradients: str | None, repeats: bool | None, identical: bool | None
) -> None:
    sure, other = Cell("net", "plain", gradients="a"), Cell("net", "x", gradients=gradients, deterministic=repeats)
    assert is_identical(sure, other) is identical
    unsure = Cell("net", "plain", gradients="a", deterministic=repeats)
    assert is_identical(unsure, Cell("net", "x", gradients=gradients)) is identical


def test_a_share_is_one_of_requested_bytes(tmp_path: Path) -> None:
    """A session counts requested bytes. The allocated ones of plain are more, for the allocator rounds up."""

    def measure(spec: CellSpec) -> Cell:
        found = measured(spec)
        found.requested_bytes = 1000
        return found

    run_of(tmp_path, measure).do([GRID])
    assert {cell.said for cell in cells_in(tmp_path) if cell.budget == "60%"} == {"600"}


def test_a_share_of_an_unknown_peak_is_not_run_and_says_why(tmp_path: Path) -> None:
    run_of(tmp_path, out_of_memory).do([GRID])
    cell = next(cell for cell in cells_in(tmp_path) if cell.budget == "60%")
    assert cell.status == NOT_RUN
    assert cell.said == ("its budget is 60% of plain's peak, which is unknown: out-of-memory, CUDA out of memory")
    assert {cell.status for cell in cells_in(tmp_path) if cell.budget == "12GiB"} == {"ok"}


def test_a_crash_is_a_result_and_the_sweep_goes_on(tmp_path: Path) -> None:
    run_of(tmp_path, crashes).do([GRID])
    found = {(cell.workload, cell.peer): cell.status for cell in cells_in(tmp_path)}
    assert found["unet", "checkpoint"] == "failed"
    assert found["vgg16", "plain"] == "ok"
    said = next(cell.said for cell in cells_in(tmp_path) if cell.status == "failed")
    assert said.startswith("its process died by SIGABRT")


def test_the_same_sweep_again_does_only_what_is_missing(tmp_path: Path) -> None:
    run_of(tmp_path).do([dataclasses.replace(GRID, workloads=("unet",))])
    before = cells_in(tmp_path)
    run_of(tmp_path).do([GRID])
    cells = cells_in(tmp_path)
    assert cells[: len(before)] == before
    assert {cell.workload for cell in cells[len(before) :]} == {"vgg16"}
    run_of(tmp_path).do([GRID])
    assert cells_in(tmp_path) == cells


def test_a_file_cut_off_by_a_kill_is_gone_on_with(tmp_path: Path) -> None:
    run_of(tmp_path).do([GRID])
    whole = what_ran(cells_in(tmp_path))
    path = tmp_path / CELLS_FILE
    path.write_bytes(path.read_bytes()[:-40])
    run_of(tmp_path).do([GRID])
    assert what_ran(cells_in(tmp_path)) == whole


def test_cells_of_a_status_are_done_again_when_asked(tmp_path: Path) -> None:
    run_of(tmp_path, crashes).do([GRID])
    run_of(tmp_path, again=frozenset({"failed"})).do([GRID])
    later = {(cell.workload, cell.peer): cell.status for cell in cells_in(tmp_path)}
    assert later["unet", "checkpoint"] == "ok"
    assert len(cells_in(tmp_path)) == 2 * 5 + 2


def test_when_the_time_is_up_what_runs_is_not_recorded(tmp_path: Path) -> None:
    run = run_of(tmp_path, hangs, limit_s=5.0)
    with pytest.raises(OutOfTime, match="the time limit is reached"):
        run.do([GRID])
    cells = cells_in(tmp_path)
    assert ("unet", "plain", None) in what_ran(cells)
    assert "checkpoint" not in {cell.peer for cell in cells}


def test_a_compiled_peer_brings_the_compiled_plain_with_it() -> None:
    specs = dataclasses.replace(GRID, peers=("compiled-offload",)).specs("unet", None)
    assert [spec.peer for spec in specs] == ["plain", "compiled-plain", "compiled-offload"]


def test_steps_of_a_run_have_names_of_their_own() -> None:
    names = [spec.step_name for grid in quick_grids() for name in grid.workloads for spec in grid.specs(name, None)]
    assert len(set(names)) == len(names)
    assert all(name.replace("-", "").replace("_", "").isalnum() for name in names)


# The command.


def test_ctrl_c_keeps_what_is_done_and_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(self: SweepRun, grids: list[Grid]) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(SweepRun, "do", interrupted)
    monkeypatch.setattr(sweep.signal, "signal", lambda number, handler: None)
    assert sweep.main(["--out", str(tmp_path)]) == 130
    assert f"The finished cells are in {tmp_path}; run the same command again to continue." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--workloads", "vgg17"], "expected a workload among alexnet"),
        (["--peers", "vdnn-never"], "expected a peer among plain, checkpoint"),
        (["--budgets", "120%"], "expected a share such as 60%, up to 100%, got '120%'"),
        (["--budgets", "much"], "much"),
        (["--hardware", "abacus"], "got 'abacus'"),
        (["--loader-workers", "2"], "place 'virtual' has no data to load"),
    ],
)
def test_what_is_asked_wrongly_is_said_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert sweep.main([*arguments, "--out", str(tmp_path / "run")]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_sweep_on_a_gpu_needs_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sweep.main(["--place", "cuda", "--out", str(tmp_path)]) == 2
    assert "torch sees no GPU here" in capsys.readouterr().err


def test_a_line_has_the_fields_that_readers_know(tmp_path: Path) -> None:
    run_of(tmp_path).do([dataclasses.replace(GRID, workloads=("unet",), peers=("plain",))])
    line = json.loads((tmp_path / CELLS_FILE).read_text().splitlines()[0])
    assert line["format"] == 1
    assert set(line) >= {
        *("workload", "batch", "peer", "budget", "budget_bytes", "place", "device", "clock", "status", "said"),
        *("step_ns", "step_times_ns", "peak_bytes", "reserved_bytes", "host_bytes", "to_host_bytes"),
        *("to_device_bytes", "stall_ns", "predicted_step_ns", "predicted_peak_bytes", "loss", "gradients"),
        *("identical", "compiled", "versions", "commit", "step"),
    }
