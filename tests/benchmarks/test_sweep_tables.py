"""Tables read only the files of a run. One whole small sweep goes from the command to the table."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import figures, tables
from benchmarks.harness.cell_spec import CellSpec, cell_of
from benchmarks.harness.largest_batch import LARGEST_FILE
from benchmarks.tables import render_run
from tests.patience import run_to_its_end
from vdnn.report.cell import FAILED, OUT_OF_MEMORY
from vdnn.report.run_folder import CELLS_FILE, append_cells, read_cells
from vdnn.step.json_lines import append_json_lines

ROOT = Path(__file__).resolve().parents[2]
GIB = 2**30


def add(folder: Path, peer: str, budget: str | None = None, **fields: Any) -> None:
    spec = CellSpec("unet", peer, "virtual", "h100", budget, batch=8)
    append_cells(folder, [cell_of(spec, **{"device": "H100", **fields})])


def test_a_row_is_compared_with_plain(tmp_path: Path) -> None:
    add(tmp_path, "vdnn-auto", "60%", step_ns=55_000_000, peak_bytes=3 * GIB, identical=True, host_bytes=GIB // 2)
    add(tmp_path, "plain", step_ns=50_000_000, peak_bytes=4 * GIB)
    add(tmp_path, "checkpoint", step_ns=50_000_000, peak_bytes=4 * GIB, identical=False)
    lines = render_run(tmp_path).splitlines()
    assert lines[0] == "unet, batch 8: virtual, H100"
    rows = {line.split("  ")[0]: line.split() for line in lines[4:7]}
    assert list(rows) == ["plain", "checkpoint", "vdnn-auto at 60%"], "in the order of the peers"
    assert rows["vdnn-auto at 60%"][3:] == ["3.00", "75%", "55.0", "1.100", "x", "-", "-", "0.50", "identical"]
    assert rows["checkpoint"][-1] == "DIFFER"
    assert "Computed in virtual time, without data." in lines


def test_budgets_of_a_peer_go_from_the_largest_to_the_least(tmp_path: Path) -> None:
    for budget in ("min", "60%", "12GiB", "90%"):
        add(tmp_path, "vdnn-auto", budget, step_ns=10**6, peak_bytes=GIB)
    found = [line.split()[2] for line in render_run(tmp_path).splitlines() if line.startswith("vdnn-auto at")]
    assert found == ["90%", "60%", "12GiB", "min"]


def test_what_failed_says_why_below_the_table(tmp_path: Path) -> None:
    add(tmp_path, "plain", status=OUT_OF_MEMORY, said="needs 90 GiB of 80 GiB", step_ns=10**6, peak_bytes=90 * GIB)
    add(tmp_path, "trl", status=FAILED, said="its process died by SIGSEGV")
    text = render_run(tmp_path)
    assert "90.00 *" in text
    assert "plain: out-of-memory, needs 90 GiB of 80 GiB." in text
    assert "trl: failed, its process died by SIGSEGV." in text


def test_a_later_cell_takes_the_place_of_an_earlier_one(tmp_path: Path) -> None:
    add(tmp_path, "plain", status=FAILED, said="the first try")
    add(tmp_path, "plain", step_ns=10**6, peak_bytes=GIB)
    assert "the first try" not in render_run(tmp_path)


def test_largest_batches_have_a_table(tmp_path: Path) -> None:
    found = {
        "workload": "unet",
        "peer": "plain",
        "place": "virtual",
        "device": "H100",
        "said": "",
        "tried": {"8": "ok"},
    }
    not_found = {**found, "peer": "trl", "largest_batch": None, "said": "at batch 8: failed"}
    append_json_lines(tmp_path / LARGEST_FILE, [{**found, "largest_batch": 15}, not_found])
    text = render_run(tmp_path)
    assert "15" in next(line for line in text.splitlines() if line.startswith("unet, plain")).split()
    assert "unet, trl: at batch 8: failed." in text


def test_pictures_and_the_page_are_the_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    add(tmp_path, "plain", step_ns=50_000_000, peak_bytes=4 * GIB)
    add(tmp_path, "vdnn-auto", "60%", step_ns=55_000_000, peak_bytes=3 * GIB)
    assert figures.main([str(tmp_path)]) == 0
    assert (tmp_path / "figures" / "report.html").stat().st_size > 0
    assert list((tmp_path / "figures").glob("*.svg"))
    assert str(tmp_path / "figures") in capsys.readouterr().out


def test_pictures_of_no_run_say_what_a_run_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert figures.main([str(tmp_path / "nowhere")]) == 2
    assert "figures: " in capsys.readouterr().err


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tables.main([str(tmp_path / "nowhere")]) == 2
    assert "expected one argument, the folder of a run" in capsys.readouterr().err
    assert tables.main([str(tmp_path)]) == 0
    assert "has no cells" in capsys.readouterr().out


@pytest.mark.slow
def test_a_small_sweep_runs_from_the_command_to_the_table(tmp_path: Path) -> None:
    """The sweep runs on the simulated device, one process for each cell. vdnn computes the same values as plain."""
    command = [sys.executable, "-m", "benchmarks.sweep", "--place", "sim", "--workloads", "unet", "--jobs", "1"]
    command += ["--peers", "plain,vdnn-auto,trl", "--budgets", "min", "--out", str(tmp_path)]
    done = run_to_its_end(command, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    cells = {cell.peer: cell for cell in read_cells(tmp_path / CELLS_FILE)}
    assert {name: cell.status for name, cell in cells.items()} == {
        "plain": "ok",
        "vdnn-auto": "ok",
        "trl": "not-run",
    }
    assert cells["vdnn-auto"].identical is True
    assert (cells["vdnn-auto"].peak_bytes or 0) < (cells["plain"].peak_bytes or 0)
    assert done.stdout.strip() == render_run(tmp_path).strip()
    assert (tmp_path / "steps" / str(cells["vdnn-auto"].step) / "plan.json").exists()
