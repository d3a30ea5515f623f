"""The headline of a run: sentences made by rules from its cells, which say if figures are virtual."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from vdnn.report.cell import Cell
from vdnn.report.comparison import comparisons
from vdnn.report.headline import headline, time_text
from vdnn.report.run_folder import Run
from vdnn.report.text_summary import text_summary

PLAIN = Cell("net", "plain", place="virtual", clock="virtual", device="h100", step_ns=1000, peak_bytes=1000)


def own(peak_bytes: int, step_ns: int, budget: str = "") -> Cell:
    return replace(PLAIN, peer="vdnn-auto", budget=budget, peak_bytes=peak_bytes, step_ns=step_ns)


def run_of(*cells: Cell) -> Run:
    return Run(Path("run"), cells, ())


def said(*cells: Cell) -> str:
    return headline(comparisons(run_of(*cells)))


def test_of_the_points_within_five_per_cent_the_smallest_is_named() -> None:
    cells = PLAIN, own(900, 1000, "90%"), own(410, 1023, "40%"), own(300, 1100, "30%")
    assert said(*cells) == trains("net", "41 %", "2.3 % longer (virtual h100).")


def test_where_none_is_within_five_per_cent_the_fastest_is_named() -> None:
    assert said(PLAIN, own(500, 1200, "a"), own(400, 1300, "b")).startswith(trains("net", "50 %", "20.0 % longer"))


def test_several_workloads_are_a_range_of_which_none_is_picked() -> None:
    other = [replace(cell, workload="other") for cell in (PLAIN, own(620, 1050))]
    assert said(PLAIN, own(410, 1023), *other) == (
        trains("2 workloads", "41 to 62 %", "2.3 to 5.0 % longer (virtual h100).", "train")
    )


def trains(name: str, share: str, time: str, verb: str = "trains") -> str:
    return f"With vdnn, {name} {verb} with {share} of the memory of plain PyTorch, and a step takes {time}"


BESIDE = trains("net", "41 %", "2.3 % longer") + "; "


def test_a_workload_without_a_plain_step_is_named_with_its_peak() -> None:
    lonely = replace(own(1 << 30, 1000), workload="other", batch=8)
    failed = replace(PLAIN, workload="other", batch=8, status="out-of-memory", step_ns=None, peak_bytes=None)
    assert said(PLAIN, own(410, 1023), lonely) == (
        f"{BESIDE}other (batch 8) trains in 1.00 GiB; plain PyTorch was not run (virtual h100)."
    )
    assert said(PLAIN, own(410, 1023), lonely, failed) == (
        f"{BESIDE}other (batch 8) trains in 1.00 GiB, where plain PyTorch runs out of memory (virtual h100)."
    )


def test_several_workloads_without_a_plain_step_are_counted() -> None:
    lonely = [replace(own(700, 1000), workload=name) for name in "abc"]
    failed = [replace(PLAIN, workload=name, status="out-of-memory", step_ns=None, peak_bytes=None) for name in "ab"]
    assert said(PLAIN, own(410, 1023), *lonely, *failed) == (
        f"{BESIDE}2 workloads train where plain PyTorch runs out of memory; "
        "plain PyTorch was not run for c (virtual h100)."
    )


def test_measured_and_virtual_are_not_compared() -> None:
    real = replace(PLAIN, place="cuda", clock="device", device="H100", step_ns=2000)
    cells = PLAIN, own(500, 1010), real
    assert [one.where for one in comparisons(run_of(*cells))] == ["virtual h100", "H100"]
    assert said(*cells) == trains("net", "50 %", "1.0 % longer (virtual h100).")


def test_what_ran_at_a_tiny_size_is_no_headline_beside_a_full_one() -> None:
    tiny = [replace(cell, place="sim", workload="small") for cell in (PLAIN, own(100, 1001))]
    assert said(PLAIN, own(500, 1010), *tiny) == trains("net", "50 %", "1.0 % longer (virtual h100).")
    assert said(*tiny) == (trains("small", "10 %", "0.1 % longer (virtual h100, tiny)."))


def test_what_broke_before_it_knew_its_device_stands_with_the_others() -> None:
    broken = replace(PLAIN, peer="trl", device=None, clock=None, status="failed", step_ns=None, peak_bytes=None)
    (compared,) = comparisons(run_of(broken, PLAIN, own(500, 1010)))
    assert [cell.peer for cell in compared.cells] == ["plain", "vdnn-auto", "trl"]
    other = replace(PLAIN, device="h200")
    assert len(comparisons(run_of(broken, PLAIN, other))) == 3  # its device is unknown


def test_compiled_is_compared_with_compiled() -> None:
    cells = PLAIN, own(500, 1010), *(replace(one, compiled=True, step_ns=500) for one in (PLAIN, own(500, 1)))
    compared = comparisons(run_of(*cells))
    assert [one.where for one in compared] == ["virtual h100", "virtual h100, compiled"]
    assert compared[1].more_time(compared[1].cells[1]) == 0


def test_plain_that_ran_out_of_memory_is_what_is_said() -> None:
    failed = replace(PLAIN, status="out-of-memory", step_ns=None, peak_bytes=None)
    assert said(failed, own(2**30, 10)) == (
        "With vdnn, net trains in 1.00 GiB, where plain PyTorch runs out of memory (virtual h100)."
    )


@pytest.mark.parametrize("cells", [(), (PLAIN,), (replace(own(1, 1), status="failed"),)])
def test_a_run_without_a_step_of_vdnns_says_so(cells: tuple[Cell, ...]) -> None:
    assert said(*cells) == "This run has no measured or predicted step of vdnn."


@pytest.mark.parametrize(
    ("least", "most", "text"),
    [
        (0.0004, 0.0004, "no longer"),
        (0.023, 0.023, "2.3 % longer"),
        (0.0001, 0.023, "up to 2.3 % longer"),
        (0.01, 1.5, "1.0 to 150 % longer"),
        (-0.1, -0.1, "10.0 % less time"),
        (-0.1, -0.02, "2.0 to 10.0 % less time"),
        (-0.1, 0.0, "up to 10.0 % less time"),
        (-0.1, 0.05, "between 10.0 % less and 5.0 % more time"),
    ],
)
def test_time_is_said_in_per_cent(least: float, most: float, text: str) -> None:
    assert time_text(least, most) == text


def test_the_text_has_every_cell_and_why_it_ended() -> None:
    failed = replace(PLAIN, peer="other", status="failed", said="it stopped", step_ns=None, peak_bytes=None)
    text = text_summary(run_of(PLAIN, own(410, 1023, "40%"), failed))
    assert "net on virtual h100" in text
    assert "failed: it stopped" in text
    assert "41.0 %" in text
    assert "+2.3 %" in text


def test_no_name_commands_the_terminal() -> None:
    assert "\x1b" not in text_summary(run_of(replace(PLAIN, workload="a\x1b[2Jb\r")))
