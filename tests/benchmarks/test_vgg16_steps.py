"""The VGG-16 part of `make bench`: it is the same in each run, and each policy moves what it should."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from benchmarks.progress import Progress
from benchmarks.vdnn_paper.policy_steps import (
    BATCHES,
    BUDGET,
    KEEP,
    VDNN_ALL,
    VDNN_CONV,
    WAYS,
    MeasuredStep,
    Way,
    measure_steps,
    step_of,
)
from benchmarks.vdnn_paper.vgg16_steps import render_steps, write_json

pytestmark = pytest.mark.slow

TITAN_X_BYTES = 12 * 2**30


@pytest.fixture(scope="module")
def measured() -> dict[tuple[int, Way], MeasuredStep]:
    steps = measure_steps(BATCHES, Progress("test", 99, stream=io.StringIO()))
    return {(step.figures.batch, step.figures.way): step for step in steps}


def test_every_way_is_measured_at_every_batch(measured: dict[tuple[int, Way], MeasuredStep]) -> None:
    assert set(measured) == {(batch, way) for batch in BATCHES for way in WAYS}


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_two_runs_give_the_same_timeline(measured: dict[tuple[int, Way], MeasuredStep], way: Way) -> None:
    assert step_of(256, way) == (measured[256, way].timeline, TITAN_X_BYTES)


@pytest.mark.parametrize("batch", BATCHES)
def test_keep_moves_nothing_and_never_stands_still(measured: dict[tuple[int, Way], MeasuredStep], batch: int) -> None:
    timeline = measured[batch, KEEP].timeline
    assert not timeline.copies
    assert timeline.stall_ns == 0
    assert measured[batch, KEEP].figures.slowdown == 1


def test_vgg16_at_256_fits_with_vdnn_and_not_without(measured: dict[tuple[int, Way], MeasuredStep]) -> None:
    fits = {way: measured[256, way].figures.fits for way in WAYS}
    assert fits == {KEEP: False, VDNN_ALL: True, VDNN_CONV: True, BUDGET: True}


@pytest.mark.parametrize("batch", BATCHES)
def test_a_budget_is_kept(measured: dict[tuple[int, Way], MeasuredStep], batch: int) -> None:
    assert measured[batch, BUDGET].figures.peak_bytes <= TITAN_X_BYTES


@pytest.mark.parametrize("batch", [64, 128])
def test_a_budget_that_holds_everything_costs_nothing(
    measured: dict[tuple[int, Way], MeasuredStep], batch: int
) -> None:
    budget, keep = measured[batch, BUDGET].figures, measured[batch, KEEP].figures
    assert (budget.step_ns, budget.peak_bytes, budget.to_host_bytes) == (keep.step_ns, keep.peak_bytes, 0)


@pytest.mark.parametrize("batch", BATCHES)
def test_what_stands_still_is_what_the_step_lasts_longer(
    measured: dict[tuple[int, Way], MeasuredStep], batch: int
) -> None:
    keep_ns = measured[batch, KEEP].figures.step_ns
    for way in WAYS:
        timeline = measured[batch, way].timeline
        recomputed_ns = timeline.step_ns - keep_ns - timeline.stall_ns
        if way.budget is None:
            assert recomputed_ns == 0, way.name
        else:
            assert 0 <= recomputed_ns < 0.02 * keep_ns, way.name


def test_moving_convolutions_alone_moves_less_than_moving_all(
    measured: dict[tuple[int, Way], MeasuredStep],
) -> None:
    conv, everything = measured[256, VDNN_CONV].figures, measured[256, VDNN_ALL].figures
    assert 0 < conv.to_host_bytes < everything.to_host_bytes
    assert conv.step_ns < everything.step_ns


def test_the_table_and_the_json_hold_every_row(measured: dict[tuple[int, Way], MeasuredStep], tmp_path: Path) -> None:
    steps = list(measured.values())
    table = render_steps([step.figures for step in steps])
    assert [line.split("  ")[0] for line in table.splitlines() if line[:1].isdigit() and ", " in line[:6]] == [
        f"{step.figures.batch}, {step.figures.way.name}" for step in steps
    ]
    write_json(tmp_path / "figures.json", steps, [])
    content = json.loads((tmp_path / "figures.json").read_text())
    assert content["clock"] == "virtual"
    assert len(content["steps"]) == len(steps)


def test_the_picture_is_drawn(measured: dict[tuple[int, Way], MeasuredStep], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from benchmarks.vdnn_paper.vgg16_picture import draw

    path = tmp_path / "a folder" / "steps.png"
    draw(list(measured.values()), path)
    assert path.read_bytes().startswith(b"\x89PNG")
