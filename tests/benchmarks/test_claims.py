"""benchmarks.claims judges each claim about a run: held, broken, or not asked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import claims
from benchmarks.claims import (
    a_third_less_for_little,
    budgets_kept,
    engines_at_full_rate,
    never_slower_than_a_peer,
    ours_run,
    predicted,
    same_gradients,
)
from vdnn.report import Cell, append_cells
from vdnn.step.timeline import Copy, Timeline, Track

MIB = 1 << 20


def cell(peer: str, peak_bytes: int = 100, step_ns: int = 1000, **changes: Any) -> Cell:
    usual: dict[str, Any] = {"batch": 8, "place": "cuda", "clock": "device"}
    return Cell("net", peer, peak_bytes=peak_bytes, step_ns=step_ns, **{**usual, **changes})


PLAIN = cell("plain")


@pytest.mark.parametrize(
    ("cells", "held"),
    [
        ([PLAIN], None),
        ([PLAIN, cell("checkpoint", 60, 1300), cell("vdnn-auto", 60, 1300)], True),
        ([PLAIN, cell("checkpoint", 60, 1300), cell("vdnn-auto", 60, 1309)], True),  # within the noise
        ([PLAIN, cell("checkpoint", 60, 1300), cell("vdnn-auto", 60, 1311)], False),
        ([PLAIN, cell("checkpoint", 60, 1300), cell("vdnn-auto", 61, 1000)], False),  # more memory than the peer
        ([PLAIN, cell("checkpoint", 60, 1300), cell("vdnn-auto", 61, 1000), cell("vdnn-auto", 40, 1200)], True),
        ([PLAIN, cell("checkpoint", 60, 1300, compiled=True), cell("vdnn-auto", 60, 1000)], None),
        ([PLAIN, cell("checkpoint", 60, 1300, batch=4), cell("vdnn-auto", 60, 1000)], None),
        ([PLAIN, cell("checkpoint", 60, 1300, status="failed"), cell("vdnn-auto", 60, 1000)], None),
    ],
)
def test_a_peer_is_met_at_its_own_peak(cells: list[Cell], held: bool | None) -> None:
    assert never_slower_than_a_peer(cells).held is held


def test_virtual_times_have_no_noise() -> None:
    cells = [cell("plain", clock="virtual"), cell("checkpoint", 60, 1300), cell("vdnn-auto", 60, 1301)]
    claim = never_slower_than_a_peer(cells)
    assert claim.held is False
    assert claim.said == "0 of 1 meetings; net, checkpoint (+30.0%, 60% of the memory): ours +30.1%"


@pytest.mark.parametrize(
    ("ours", "held"),
    [((66, 1030), True), ((67, 1000), False), ((50, 1031), False), (None, None)],
)
def test_a_third_less_memory_for_little_time(ours: tuple[int, int] | None, held: bool | None) -> None:
    cells = [PLAIN, cell("checkpoint", 10, 1000), *([] if ours is None else [cell("vdnn-auto", *ours)])]
    assert a_third_less_for_little(cells).held is held


@pytest.mark.parametrize(("identical", "held"), [(True, True), (False, False), (None, None)])
def test_gradients_are_judged_where_they_were_compared(identical: bool | None, held: bool | None) -> None:
    assert same_gradients([cell("vdnn-auto", identical=identical), cell("trl", identical=False)]).held is held


@pytest.mark.parametrize(
    ("status", "held"), [("ok", True), ("failed", False), ("out-of-memory", False), ("not-run", None)]
)
def test_what_is_ours_has_to_run(status: str, held: bool | None) -> None:
    assert ours_run([cell("vdnn-auto", status=status), cell("trl", status="failed")]).held is held


def test_a_budget_that_no_plan_meets_is_an_answer() -> None:
    refused = cell("vdnn-auto", status="failed", said="budget 5 GiB cannot be met: 6 GiB are needed")
    assert ours_run([cell("vdnn-auto"), refused]).said == "1 of 1"


@pytest.mark.parametrize(("peak_bytes", "held"), [(1004, True), (1006, False)])
def test_a_budget_is_kept_but_for_what_an_allocator_rounds(peak_bytes: int, held: bool) -> None:
    assert budgets_kept([cell("vdnn-auto", peak_bytes, budget="50%", budget_bytes=1000)]).held is held


def test_budgets_and_peaks_are_compared_in_requested_bytes() -> None:
    """An allocator rounds: the allocated peak is above the budget of requested bytes, and above the peer's."""
    ours = cell("vdnn-auto", 1100, 900, requested_bytes=1000, budget="=checkpoint", budget_bytes=1000)
    assert budgets_kept([ours]).held is True
    peer = cell("checkpoint", 1050, 1000, requested_bytes=1000)
    assert never_slower_than_a_peer([PLAIN, peer, ours]).held is True
    over = cell("vdnn-auto", 1000, 900, requested_bytes=1006, budget="50%", budget_bytes=1000)
    assert budgets_kept([over]).held is False


def test_only_a_broken_promise_is_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    append_cells(tmp_path, [PLAIN, cell("vdnn-auto", 90, 2000)])
    assert claims.main([str(tmp_path)]) == 0
    assert "missed     a third less memory" in capsys.readouterr().out
    append_cells(tmp_path, [cell("vdnn-auto", 90, 2000, identical=False, budget="90%")])
    assert claims.main([str(tmp_path)]) == 1
    assert "BROKEN     gradients are the plain ones: 0 of 1" in capsys.readouterr().out


def test_what_was_predicted_is_held_against_what_came() -> None:
    cells = [cell("vdnn-auto", step_ns=1040, predicted_step_ns=1000), cell("vdnn-auto", step_ns=1000)]
    claim = predicted(cells, "step_ns", "predicted_step_ns", 0.05)
    assert claim.held is True
    assert claim.said.startswith("1 of 1; median 3.85%")  # 1 - 1000 / 1040
    assert predicted(cells, "step_ns", "predicted_step_ns", 0.03).held is False
    assert predicted(cells[1:], "step_ns", "predicted_step_ns", 0.03).held is None


def run_with(tmp_path: Path, copied_ns: int) -> tuple[Path, list[Cell]]:
    """A run whose link was probed at one byte per ns in each direction, and at 1.9 in both at once."""
    rate = 10**9
    probed = {"to_host_bytes_per_s": rate, "to_device_bytes_per_s": rate, "both_ways_bytes_per_s": int(1.9 * rate)}
    slower = dict.fromkeys(probed, rate // 8)  # small blocks, with which long copies are not compared
    rows = [{"block_bytes": 16 * MIB, **probed}, {"block_bytes": MIB, **slower}]
    (tmp_path / "link.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    copies = (
        Copy(Track.TO_HOST, 0, 16 * MIB, 0, copied_ns),
        Copy(Track.TO_HOST, 1, MIB, copied_ns, 100 * copied_ns),  # too short to judge
    )
    folder = tmp_path / "steps" / "net.vdnn"
    folder.mkdir(parents=True)
    Timeline("measured", "device", 1000, (), copies).save(folder / "measured.json")
    cells = [PLAIN, cell("vdnn-auto", step="net.vdnn")]
    append_cells(tmp_path, cells)
    with (tmp_path / "cells.jsonl").open("a") as file:
        file.write('{"workload": "cut o')
    return tmp_path, cells


@pytest.mark.parametrize(("part", "held"), [(0.96, True), (0.91, True), (0.90, False)])
def test_copy_engines_are_held_against_the_link(tmp_path: Path, part: float, held: bool) -> None:
    """The required rate is 0.95 of the link's share for each direction while both are busy: 0.95 x 0.95."""
    run, cells = run_with(tmp_path, round(16 * MIB / part))
    assert engines_at_full_rate(run, cells).held is held
    assert engines_at_full_rate(tmp_path / "steps", cells).held is None


def test_all_claims_of_a_run_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, _ = run_with(tmp_path, 16 * MIB)
    assert claims.main([str(run)]) == 0  # no cell uses a third less memory, which is an aim
    said = capsys.readouterr().out
    assert "missed     a third less memory at 3 % or less: none" in said
    assert "held       what is ours ran: 1 of 1" in said
    assert "not asked  budgets are kept" in said
    assert claims.main([str(tmp_path / "nowhere")]) == 2
