"""Steps whose shapes change: a tiny case is measured, and its figures follow from its steps."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from benchmarks.shapes import __main__ as shapes
from benchmarks.shapes.cases import CASES, Case, decoder, routes_of
from benchmarks.shapes.figures import CaseFigures, Executed, StepFigures
from benchmarks.shapes.measure import measure
from benchmarks.shapes.networks import Shape

TINY = Shape(vocabulary=64, width=128, heads=2, layers=2)
LENGTHS = (64, 32, 64, 64)


def step(size: int, trained: int, alone: int, peak_bytes: int, *, is_first: bool = False) -> StepFigures:
    kept = Executed(alone // 2, 200)
    return StepFigures((size,), is_first, Executed(trained, peak_bytes), kept, Executed(alone, 90))


MADE = CaseFigures(
    name="made",
    budget_bytes=100,
    steps=(step(2, 80, 20, 101, is_first=True), *[step(1, 12, 10, 50)] * 5, step(2, 60, 20, 100)),
    pinned_bytes=30,
    moved_bytes_alone=20,
    plans=3,
    wall_s=0.5,
    pinned_at_end_bytes=12,
    planned_bytes=10,
    planning_s=20e-9,
    one_session_ns=(100, 100, 100, 10, 10, 10, 10),
)


@pytest.mark.slow
def test_a_case_is_measured_beside_its_own_plans() -> None:
    sizes = tuple((length,) for length in LENGTHS)
    case = Case("tiny", partial(decoder, 64, TINY), sizes)
    found = measure(case)
    assert [one.size for one in found.steps] == list(sizes)
    assert [one.is_first_of_structure for one in found.steps] == [True, False, False, False]
    kept_bytes = [one.kept.peak_bytes for one in found.steps]
    assert found.budget_bytes == int(0.6 * max(kept_bytes))
    for one in found.steps:
        assert one.kept.step_ns <= one.alone.step_ns
        assert one.alone.peak_bytes <= found.budget_bytes
        if one.kept.peak_bytes <= found.budget_bytes:
            assert one.alone == one.kept
    assert found.plans > 0
    assert found.planning_s
    assert found.waiting_share == found.planning_s / found.step_s
    assert found.pinned_bytes > 0
    assert found.moved_bytes_alone > 0
    assert found.one_session_ns is None


def test_the_figures_follow_from_the_steps() -> None:
    assert [one.size for one in MADE.over_budget] == [(2,)]
    assert MADE.largest_share == 1.01
    # Behind the fifth step: 12 and 60, where alone 10 and 20, and with everything kept 5 and 10.
    assert MADE.over_own_plans == 72 / 30
    assert MADE.over_kept == 72 / 15
    assert (MADE.worst_step, MADE.worst_first_step) == (3, 4)
    assert MADE.pinned_over_moved == 1.5
    assert MADE.waiting_share == 20 / (80 + 5 * 12 + 60)
    # Behind the third step.
    assert MADE.over_one_session == (3 * 12 + 60) / 40


def test_figures_of_another_version_stand_in_the_same_table(tmp_path: Path) -> None:
    file = tmp_path / "before.jsonl"
    file.write_text(json.dumps(MADE.as_json()) + "\n")
    assert shapes.read(file) == {"made": MADE}
    table = shapes.render([MADE], shapes.read(file)).splitlines()
    before, after = (next(line.split() for line in table if name in line) for name in ("made: before", "after"))
    assert before[2:] == after[1:]
    assert any("of the 1 with a before: 2.400 before, 2.400 after." in line for line in table)
    assert " ".join(after[1:]) == "1 of 7 1.010 2.400 4.800 3.00 4.00 1.50 1.20 3 10.0% 2.400 0.5"
    assert any(line.startswith("waits, all cases together: 10.0%.") for line in table)


def test_the_steps_are_listed_with_marks() -> None:
    lines = shapes.render_steps(MADE).splitlines()
    assert next(line for line in lines if line.startswith("1: 2")).split()[-3:] == ["OVER", "first", "slow"]


def test_routes_send_each_token_to_two_experts() -> None:
    shape = Shape(layers=3, experts=8)
    routes = [routes_of(seed, 100, shape) for seed in range(10)]
    assert all(sum(counts) == 200 and len(counts) == 8 for layers in routes for counts in layers)
    assert any(0 in counts for layers in routes for counts in layers)
    assert routes_of(3, 100, shape) == routes[3]


def test_an_unknown_case_is_refused() -> None:
    with pytest.raises(SystemExit, match=f"expected cases among {CASES[0].name}"):
        shapes.main(["--cases", "nothing"])
