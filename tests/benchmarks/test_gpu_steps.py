"""benchmarks.gpu_steps without a GPU: its whole program at tiny size, on a virtual machine with real tensors."""

from __future__ import annotations

import contextlib
import io
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import gpu_steps
from benchmarks.gpu_steps import MODELS, TINY_MODELS, StepResult, measure, render
from benchmarks.gradient_check import GradientCheck, deterministic
from benchmarks.models.gpt import Block
from benchmarks.step_places import VirtualPlace
from benchmarks.step_verdict import faults_of_steps, steps_headline
from benchmarks.step_ways import CHECKPOINTING, PLAIN, STEP_WAYS, VDNN_ALL, StepWay, Trial

NAMES = [way.name for way in STEP_WAYS]
GPT = TINY_MODELS[1]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """The results and what was printed of one run of the program."""
    path = tmp_path_factory.mktemp("steps") / "steps.json"
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
        assert gpu_steps.main(["--device", "cpu", "--json", str(path)]) == 0
    return json.loads(path.read_text()), printed.getvalue()


@pytest.fixture(scope="module")
def rows(run: tuple[dict[str, Any], str]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(row["model"], row["way"]): row for row in run[0]["steps"]}


def test_every_way_runs_on_every_model(rows: dict[tuple[str, str], dict[str, Any]]) -> None:
    assert list(rows) == [(model.name, name) for model in TINY_MODELS for name in NAMES]
    assert {row["said"] for row in rows.values()} == {""}
    assert {row["deterministic"] for row in rows.values()} == {True}


def test_every_gradient_is_the_plain_one(rows: dict[tuple[str, str], dict[str, Any]]) -> None:
    assert {place: row["max_difference"] for place, row in rows.items() if not row["identical"]} == {}


@pytest.mark.parametrize("model", TINY_MODELS, ids=["resnet", "gpt"])
def test_moving_lowers_the_peak_and_a_budget_is_kept(
    rows: dict[tuple[str, str], dict[str, Any]], model: gpu_steps.StepModel
) -> None:
    plain, everything = rows[model.name, "plain"], rows[model.name, "vdnn-all"]
    budget = rows[model.name, "vdnn, budget 60%"]
    assert everything["peak_bytes"] < budget["peak_bytes"] < plain["peak_bytes"]
    assert budget["budget_bytes"] == int(0.6 * plain["peak_bytes"]) >= budget["peak_bytes"]
    assert everything["to_host_bytes"] > budget["to_host_bytes"] > 0
    assert everything["release_stall_ns"] + everything["reload_stall_ns"] > 0


def test_what_a_way_has_not_is_none(rows: dict[tuple[str, str], dict[str, Any]]) -> None:
    without = {name for (_, name), row in rows.items() if row["release_stall_ns"] is None}
    assert without == {
        "plain",
        "block checkpointing",
        "vdnn-all, not measured",
        "save_on_cpu, pinned",
        "save_on_cpu, pageable",
    }
    assert {row["budget_bytes"] is None for (_, name), row in rows.items() if "budget" not in name} == {True}


def test_the_tables_have_a_line_for_every_way(run: tuple[dict[str, Any], str]) -> None:
    lines = run[1].splitlines()
    for model in TINY_MODELS:
        assert f"{model.name} on virtual h100" in lines
    for name in NAMES:
        own = [line for line in lines if line.startswith(f"{name}  ")]
        assert len(own) == 2
        assert all(line.endswith("identical") for line in own)


def test_the_verdict_on_the_run_is_that_it_passed(run: tuple[dict[str, Any], str]) -> None:
    assert faults_of_steps(run[0]["steps"]) == []
    assert steps_headline(run[0]["steps"]) == "16 of 16 ways of 2 models ran, gradients identical in 16"


def test_the_large_models_are_the_ones_that_were_promised() -> None:
    with VirtualPlace() as place, torch.device("meta"), place.making():
        resnet, gpt = (model.make() for model in MODELS)
    assert resnet.inputs[0].shape == (256, 3, 224, 224)
    assert resnet.parameter_count == 25_557_032
    assert gpt.inputs[0].shape == (16, 1024)
    assert sum(isinstance(module, Block) for module in gpt.model.modules()) == 12


# What goes wrong.


def refusing(trial: Trial) -> contextlib.AbstractContextManager[None]:
    raise MemoryError("no room\nfor anything")


@contextlib.contextmanager
def spoiling(trial: Trial) -> Iterator[None]:
    """Another gradient than the plain one's, by one bit of one number."""
    parameter = next(trial.workload.model.parameters())

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        spoiled = gradient.clone()
        spoiled.view(-1)[0] = torch.nextafter(spoiled.view(-1)[0], torch.tensor(2.0))
        return spoiled

    handle = parameter.register_hook(spoil)
    try:
        yield
    finally:
        handle.remove()


def test_a_way_that_fails_stops_no_other() -> None:
    wrote: list[StepResult] = []
    ways = (PLAIN, StepWay("refusing", 0, refusing), StepWay("spoiling", 0, spoiling), CHECKPOINTING)
    results = measure(VirtualPlace(), [GPT], ways=ways, wrote=wrote.append)
    assert wrote == results
    assert [row.said for row in results] == ["", "MemoryError: no room", "", ""]
    assert [row.identical for row in results] == [True, None, False, True]
    assert 0 < (results[2].max_difference or 0) < 1e-6
    assert "refusing: MemoryError: no room." in render("here", results).splitlines()


def test_what_there_is_no_time_for_is_not_begun() -> None:
    results = measure(VirtualPlace(), [GPT], ways=(PLAIN, VDNN_ALL), limit_s=-1)
    assert [row.said for row in results] == ["not run: no time is left"] * 2
    assert faults_of_steps([{"model": row.model, "way": row.way, "said": row.said} for row in results]) == [
        f"{GPT.name}: plain: not run: no time is left"
    ]


def test_no_more_steps_are_timed_than_patience_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_steps, "PATIENCE_S", 0.0)
    before = time.monotonic()
    (result,) = measure(VirtualPlace(), [GPT], ways=(PLAIN,))
    assert result.timed_steps == 1
    assert time.monotonic() > before


def test_blocks_compute_again_only_while_checkpointing_is_open() -> None:
    place = VirtualPlace()
    with place:
        workload = GPT.make()
        block = next(module for module in workload.model.modules() if isinstance(module, Block))
        with CHECKPOINTING.open(Trial(place, workload)):
            assert "forward" in vars(block)
        assert "forward" not in vars(block)


def test_checkpointing_without_blocks_is_refused() -> None:
    place = VirtualPlace()
    workload = GPT.make()._replace(model=nn.Linear(2, 2))
    with (
        pytest.raises(ValueError, match="expected blocks in Linear, found none"),
        CHECKPOINTING.open(Trial(place, workload)),
    ):
        pass


# The comparison of gradients.


def test_an_operation_without_a_deterministic_form_is_run_as_far_as_it_goes() -> None:
    model = nn.Linear(2, 1)

    def step() -> None:
        if not torch.is_deterministic_algorithms_warn_only_enabled():
            raise RuntimeError("spread_cuda does not have a deterministic implementation")
        model(torch.ones(1, 2)).sum().backward()

    check = GradientCheck(model)
    assert check.compare(step).identical
    assert check.is_strict is False
    assert check.compare(step).identical
    assert model.weight.grad is None


def test_another_error_is_not_taken_for_one_of_determinism() -> None:
    def step() -> None:
        raise RuntimeError("out of memory")

    check = GradientCheck(nn.Linear(2, 1))
    with pytest.raises(RuntimeError, match="out of memory"):
        check.compare(step)
    assert check.is_strict


def test_a_difference_that_is_no_number_is_infinite() -> None:
    model = nn.Linear(1, 1, bias=False)
    check = GradientCheck(model)
    check.compare(lambda: model(torch.ones(1, 1)).sum().backward())
    compared = check.compare(lambda: model(torch.full((1, 1), float("nan"))).sum().backward())
    assert not compared.identical
    assert compared.max_difference == float("inf")


def test_determinism_is_as_it_was_afterwards() -> None:
    with contextlib.suppress(KeyError), deterministic(strict=True):
        assert torch.are_deterministic_algorithms_enabled()
        raise KeyError
    assert not torch.are_deterministic_algorithms_enabled()
