"""The benchmark of host time: its ways, and what it makes of their times."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks.core import host_time
from benchmarks.core.host_time import measure, table
from benchmarks.core.host_ways import (
    CHECKPOINT,
    GUARDED,
    LENGTHS_WAY,
    PLAIN,
    PLAIN_LENGTHS,
    RECORDED,
    RECORDED_RECIPES,
    SHARES,
    CountedGauges,
    Way,
    counted_gauges,
    settled,
    ways_of,
)
from benchmarks.core.small_plans import Model, recorded, small_plan
from benchmarks.models import gpt
from benchmarks.models.workload import Workload
from vdnn import _C
from vdnn.step.plan import Plan

_SMALL = gpt.GptShape(vocabulary=64, tokens=32, layers=1, width=48, heads=4)


def a_gpt() -> Workload:
    return gpt.gpt(2, 16, _SMALL)


def a_model() -> Model:
    return Model(a_gpt, a_gpt, gpt.Block, has_lengths=True)


@pytest.fixture(scope="module")
def plans() -> dict[float, Plan]:
    whole = recorded(a_gpt)
    plan = small_plan(whole, whole, 0.75)
    return dict.fromkeys(SHARES, plan)


def spending(taken_ns: int, readings: int = 0) -> Callable[[], None]:
    """A step that takes so long by the clock that `clock` patches."""

    def step() -> None:
        _Clock.now_ns += taken_ns
        CountedGauges.readings += readings

    return step


class _Clock:
    now_ns = 0


def test_times_are_medians_over_plain_and_beside_checkpointing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_time.time, "thread_time_ns", lambda: _Clock.now_ns)
    nothing = Workload(torch.nn.Identity(), (), lambda made: made)
    taken = {PLAIN: 8, CHECKPOINT: 18, "slow": 13, PLAIN_LENGTHS: 4, LENGTHS_WAY: 6}
    ways = {name: Way(nothing, spending(ms * 1_000_000)) for name, ms in taken.items()}
    ways["asks"] = Way(nothing, spending(0, readings=3))
    found = {row.way: row for row in measure("a model", ways, 3)}
    assert [found[name].ms for name in taken] == list(taken.values())
    assert (found["slow"].over_plain_ms, found["slow"].excess) == (5, 0.5)
    assert found[LENGTHS_WAY].over_plain_ms == 2, "over plain on the same lengths"
    assert found["asks"].readings == 3
    lines = table(list(found.values())).splitlines()
    assert next(line.split() for line in lines if line.startswith("slow")) == ["slow", "13.00", "5.00", "0.62", "0.50"]


def test_each_way_does_what_its_name_says(plans: dict[float, Plan]) -> None:
    with counted_gauges():
        ways = ways_of(a_model(), plans, _C.SimDevice)
        for way in ways.values():
            way.before()
            way.step()
        for name in (settled(0.9), settled(0.55)):
            session = ways[name].session
            assert session is not None
            for _ in range(4):
                ways[name].step()
            assert session._engine.steps.settling is not None
            assert session._engine.steps.settling.is_expected
        for name, has_recipes in ((RECORDED, False), (RECORDED_RECIPES, True)):
            session = ways[name].session
            assert session is not None
            for _ in range(2):
                before = CountedGauges.readings
                ways[name].before()
                ways[name].step()
                assert CountedGauges.readings > before
                assert session.recording is not None
                assert any(one.recompute for one in session.recording.lifetimes) is has_recipes
        guarded = ways[GUARDED].session
        assert guarded is not None
        assert guarded.plan is None
        assert guarded.recording is None


@pytest.mark.slow
def test_the_figures_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_time, "models", lambda: {"a GPT": a_model(), "another": a_model()})
    path, threads = tmp_path / "figures.json", torch.get_num_threads()
    try:
        options = ["--models", "a *", "--ways", "*90%, settled", "--rounds", "1", "--json", str(path)]
        assert host_time.main(options) == 0
        rows = json.loads(path.read_text())["rows"]
    finally:
        torch.set_num_threads(threads)
    assert {row["model"] for row in rows} == {"a GPT"}
    assert {PLAIN, CHECKPOINT, settled(0.9)} <= {row["way"] for row in rows}
    assert all(row["ms"] > 0 for row in rows)


def test_a_model_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        host_time.main(["--models", "AlexNet"])
    assert "no model is named 'AlexNet': there are GPT-2, ResNet-50" in capsys.readouterr().err


def test_a_model_of_another_structure_is_refused() -> None:
    deeper = gpt.GptShape(vocabulary=64, tokens=32, layers=2, width=48, heads=4)
    with pytest.raises(RuntimeError, match="expected a small model with the saves and uses"):
        small_plan(recorded(a_gpt), recorded(lambda: gpt.gpt(2, 16, deeper)), 0.75)
