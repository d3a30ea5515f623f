"""Advice names debugging tools that are on, around the steps or inside them, and says how to turn each off."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.advisor.programs import evidence_of, found, perceptron, training_of
from vdnn.advisor.advice import Basis, Kind
from vdnn.advisor.diagnostics import TOOLS


def names(evidence: Any) -> list[str]:
    return [advice.seen.removesuffix(" is on during the step.") for advice in found(Kind.DEBUGGING, evidence)]


@pytest.fixture
def anomaly() -> Iterator[None]:
    torch.set_anomaly_enabled(True)
    yield
    torch.set_anomaly_enabled(False)


def test_none_on_is_nothing_to_say() -> None:
    assert names(evidence_of(training_of(perceptron()), steps=1)) == []


@pytest.mark.usefixtures("anomaly")
def test_anomaly_detection_is_found_and_left_as_it_was() -> None:
    evidence = evidence_of(training_of(perceptron()))
    assert names(evidence) == ["autograd's anomaly detection"]
    assert evidence.base.step_ns > 0
    assert torch.is_anomaly_enabled()
    (advice,) = found(Kind.DEBUGGING, evidence)
    assert advice.action == "torch.autograd.set_detect_anomaly(False)"
    assert advice.gain.basis is Basis.UNKNOWN


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_what_a_step_turns_on_inside_is_found() -> None:
    def step(model: Any, optimizer: Any, batch: Any) -> None:
        with torch.autograd.detect_anomaly():
            functional.cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()
        optimizer.zero_grad()

    assert names(evidence_of(training_of(perceptron(), step=step), steps=1)) == ["autograd's anomaly detection"]


def test_a_profiler_that_runs_is_found() -> None:
    with torch.autograd.profiler.profile():
        assert names(evidence_of(training_of(perceptron()), steps=1)) == ["torch's profiler"]


@pytest.mark.parametrize(
    ("variable", "value", "tool"),
    [
        ("CUDA_LAUNCH_BLOCKING", "1", "CUDA_LAUNCH_BLOCKING=1"),
        ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", "TORCH_DISTRIBUTED_DEBUG=DETAIL"),
    ],
)
def test_what_the_environment_turns_on_is_found(
    variable: str, value: str, tool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    assert names(evidence_of(training_of(perceptron()))) == [tool]
    monkeypatch.setenv(variable, "0" if value == "1" else "OFF")
    assert names(evidence_of(training_of(perceptron()))) == []


@pytest.mark.parametrize(
    ("turn", "tool"),
    [
        (lambda on: setattr(torch.backends.cudnn, "deterministic", on), "cudnn.deterministic"),
        (torch.use_deterministic_algorithms, "deterministic algorithms"),
    ],
)
def test_settings_of_torch_are_found(turn: Callable[[bool], None], tool: str) -> None:
    turn(True)
    try:
        assert names(evidence_of(training_of(perceptron()))) == [tool]
    finally:
        turn(False)


def test_each_tool_has_a_way_to_turn_it_off() -> None:
    assert all(TOOLS.values())
