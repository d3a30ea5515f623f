"""Plans of whole trainings in a run: saved, read again, in the text, on the page and in pictures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from vdnn.report.figures import figures_of, write_figures
from vdnn.report.page import page_of
from vdnn.report.run_folder import read_run
from vdnn.report.saved_plan import save_training_report
from vdnn.report.text_summary import text_summary
from vdnn.report.training_pictures import dram_shares
from vdnn.report.training_report import BusySpan, PlacedUnits, TaskMemory, TrainingReport, batch_table

MIB, MS = 1 << 20, 1_000_000
UNITS = PlacedUnits(
    *("layers.0-3", 4, 8 * MIB, 8 * MIB, 48 * MIB, 64 * MIB, "kept", "on the device", "on the device"),
    *("on the host, steps on the device", 48 * MIB, 48 * MIB),
)
MEMORY = tuple(
    TaskMemory(f"{kind} of layers.0", 8 * MIB, gradient * MIB, state * MIB, 64 * MIB, MIB, 3 * MIB)
    for kind, gradient, state in (("forward", 0, 0), ("backward", 8, 0), ("step", 8, 48))
)
SPANS = (
    BusySpan("device", "forward of layers.0", 0, 10 * MS, 0),
    BusySpan("device", "backward of layers.0", 10 * MS, 30 * MS, 0),
    BusySpan("device", "step of layers.0", 35 * MS, 40 * MS, 0),
    BusySpan("to device", "optimizer state of layers.0", 20 * MS, 30 * MS, 100 * MS),
    BusySpan("cpu", "step of layers.0", 20 * MS, 30 * MS, 300 * MS),
)
REPORT = TrainingReport(
    model="a.py:build",
    batch=8,
    micro_batches=1,
    optimizer="adamw",
    clips=True,
    hardware="rtx-4090",
    budget_bytes=140 * MIB,
    host_limit_bytes=1 << 30,
    host_bytes_per_s=50e9,
    cpu_bytes_per_s=40e9,
    link_bytes_per_s=25e9,
    allowed=("cpu-step",),
    computing_ns=35 * MS,
    step_ns=40 * MS,
    bound_ns=38 * MS,
    step_time="after backward",
    slice_bytes=128 * MIB,
    peak_bytes=132 * MIB,
    kept_peak_bytes=200 * MIB,
    rehearsed_peak_bytes=150 * MIB,
    cycle_peak_bytes=150 * MIB,
    host_bytes=48 * MIB,
    to_device_bytes=48 * MIB,
    to_host_bytes=48 * MIB,
    cpu_step_bytes=300 * MS,
    parameter_bytes=8 * MIB,
    gradient_bytes=8 * MIB,
    state_bytes=48 * MIB,
    fixed_bytes=MIB,
    units=(UNITS,),
    memory=MEMORY,
    spans=SPANS,
    notes=("a note <b>",),
    plan_seconds=0.5,
)


def test_a_run_has_its_trainings_in_text_and_on_the_page(tmp_path: Path) -> None:
    save_training_report(tmp_path, REPORT)
    save_training_report(tmp_path, replace(REPORT, step_ns=39 * MS))  # the same training again
    save_training_report(tmp_path, replace(REPORT, batch=16))
    run = read_run(tmp_path)
    assert [(one.batch, one.step_ns) for one in run.trainings] == [(16, 40 * MS), (8, 39 * MS)]
    assert "layers.0-3" in text_summary(run)
    page = page_of(run)
    assert page.count("<h2>Whole trainings</h2>") == 1
    assert "a note &lt;b&gt;" in page
    assert len(figures_of(run).trainings) == 2


def test_both_pictures_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    save_training_report(tmp_path, REPORT)
    written = write_figures(tmp_path, tmp_path / "figures")
    svg = "".join(path.read_text() for path in written if path.suffix == ".svg")
    for word in ("optimizer state", "on their way", "budget 140.00 MiB", "to device", "CPU", "DRAM"):
        assert f">{word}<" in svg, word


def test_the_hosts_memory_is_shared_by_copies_and_steps() -> None:
    edges, shares = dram_shares(REPORT, 4)
    assert edges == [0.0, 10.0, 20.0, 30.0, 40.0]
    # 400 MB in 10 ms of a memory that takes 500 MB.
    assert shares == pytest.approx([0.0, 0.0, 80.0, 0.0])


def test_the_text_has_both_numbers_of_each_limit() -> None:
    text = str(REPORT)
    assert "peak 132.00 MiB of 140.00 MiB, host memory 48.00 MiB of 1.00 GiB" in text
    assert "1.143 x of pure computing" in text
    assert "at most 5.26 % above the fastest possible plan" in text
    assert "clipped by the norm" in text
    rows = batch_table({8: REPORT, 16: "does not fit"}).splitlines()
    assert rows[1].split()[:2] == ["8", "132.00"]
    assert rows[2].split() == ["16", "does", "not", "fit"]
