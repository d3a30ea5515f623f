"""The rows of published systems: one is measured, read back and drawn. In the stored rows none is faster than auto."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.plans import published_checkpointing
from benchmarks.plans.plan_cell import PlanCell, read_plan_cells
from benchmarks.plans.published_checkpointing import GENETIC, POLICIES, render
from benchmarks.plans.published_rows import CARD, LEAST, NETWORKS, ROWS, Row
from vdnn.hardware import load_profile
from vdnn.planning.catalogue import planner_names

KEPT = Path(published_checkpointing.__file__).parents[1] / "results" / "published_checkpointing.jsonl"


def test_every_row_has_a_network_a_card_a_policy_and_a_key_of_its_own() -> None:
    assert len({row.key for row in ROWS}) == len(ROWS)
    for row in ROWS:
        assert row.network in NETWORKS
        assert load_profile(row.card).memory_bytes > 0
        assert row.policy in POLICIES
        assert row.budget in (CARD, LEAST) or 0 < float(row.budget) < 1
    assert set(POLICIES) - {GENETIC} <= set(planner_names())


@pytest.mark.slow
def test_a_row_is_measured_once_and_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    row = Row("DTR", "dtr", "U-Net", 2, "v100-16", 0.76, 1.14, "a smaller batch there")
    monkeypatch.setattr(published_checkpointing, "ROWS", (row,))
    results = tmp_path / "deep" / "rows.jsonl"
    assert published_checkpointing.main([str(results)]) == 0
    cells = read_plan_cells(results)
    assert [cell.policy for cell in cells] == list(POLICIES)
    assert published_checkpointing.main([str(results)]) == 0
    assert read_plan_cells(results) == cells, "what is there is not done again"
    said = capsys.readouterr().out
    assert "DTR: U-Net, 2, v100-16" in said
    assert "1) Another network than the published one: a smaller batch there." in said
    assert all(cell.recomputed_share > 0.9 for cell in cells), "convolutions, too"


def test_what_misses_says_why() -> None:
    (row,) = (one for one in ROWS if (one.network, one.budget) == ("ResNet-50", 0.60))
    cell = PlanCell(
        network=row.network,
        batch=row.batch,
        hardware=row.card,
        policy="auto",
        row=row.key,
        budget_bytes=600,
        card_bytes=2000,
        resident_bytes=100,
        recomputed_share=0.4,
        keep_ns=10,
        keep_bytes=1000,
    )
    missed, met = replace(cell, peak_bytes=700), replace(cell, fits=True, peak_bytes=590, step_ns=11)
    said = render([*(replace(missed, policy=policy) for policy in POLICIES[:-1]), met])
    assert "over: 70 % (40 %)" in said
    assert "1) Too little of what the step saves can be recomputed" in said
    slow = [replace(met, policy=policy, step_ns=13) for policy in POLICIES[:-1]]
    assert "1) Nearly all of the forward pass is computed again" in render([*slow, met])


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.key)
def test_nobody_is_faster_than_auto_in_what_is_kept(row: Row) -> None:
    found = {cell.policy: cell for cell in read_plan_cells(KEPT) if cell.row == row.key}
    assert set(found) == set(POLICIES)
    auto = found["auto"]
    for cell in found.values():
        assert not cell.fits or (auto.fits and auto.slowdown <= cell.slowdown)
