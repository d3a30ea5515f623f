"""The evidence of an examination: each rehearsal runs once, facts of the GPU are used, and gaps are reported."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.advisor.programs import evidence_of, found, perceptron, training_of
from vdnn.advisor.advice import Basis, Kind
from vdnn.advisor.change import Change
from vdnn.advisor.evidence import Evidence, NotSeen
from vdnn.advisor.examination import examine
from vdnn.advisor.host_syncs import HostSync
from vdnn.advisor.loop_training import LoopTraining
from vdnn.advisor.parts import WorkloadTraining
from vdnn.hardware import load_profile

H100 = load_profile("h100")


def test_each_step_is_rehearsed_once_and_the_doing_is_told() -> None:
    doing: list[str] = []
    training = WorkloadTraining(lambda batch: (perceptron(1), torch.randn(batch, 256)), 4, name="perceptron")
    evidence = Evidence(training, H100, on_progress=doing.append)
    assert evidence.base is evidence.base
    assert evidence.step(Change(batch=8), "a batch of 8") is evidence.step(Change(batch=8), "a batch of 8")
    assert doing == ["rehearsing the step as it is", "rehearsing a batch of 8"]


def test_an_examination_tells_what_it_does_and_clears_the_line() -> None:
    doing: list[str] = []
    training = WorkloadTraining(lambda batch: (perceptron(1), torch.randn(batch, 256)), 4, name="perceptron")
    examine(training, load_profile("titan-x"), budget="64MiB", on_progress=doing.append)
    assert doing[0] == "rehearsing the step as it is"
    assert doing[-1] == ""


def test_the_same_step_takes_the_same_anywhere() -> None:
    training = training_of(perceptron())
    assert evidence_of(training).base == evidence_of(training).base


def test_a_wait_that_a_gpu_was_timed_at_is_a_measured_gain() -> None:
    evidence = evidence_of(training_of(perceptron()), steps=1)
    waits = (HostSync("train.py:7", ".item()", 2, 300_000), HostSync("train.py:9", ".item()", 1, 400_000))
    evidence.observed = replace(evidence.real, syncs=waits, step_ns=1_000_000)
    longest, other = found(Kind.HOST_SYNC, evidence)
    assert longest.gain.basis is Basis.MEASURED
    assert (longest.gain.before_ns, longest.gain.after_ns) == (1_000_000, 600_000)
    assert other.gain.saved_ns == 300_000
    assert "at most" in longest.gain.reason


def test_without_room_for_copies_the_rest_is_looked_at_and_the_reason_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(training: LoopTraining) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")

    monkeypatch.setattr(LoopTraining, "copies", no_room)
    evidence = evidence_of(training_of(perceptron()), steps=2)
    assert evidence.base.step_ns > 0
    with pytest.raises(NotSeen, match="no room for a copy of the model: CUDA out of memory"):
        _ = evidence.real


def test_a_plan_that_no_budget_meets_is_no_advice_and_hides_no_other() -> None:
    training = WorkloadTraining(lambda batch: (perceptron(1), torch.randn(batch, 256)), 4, name="perceptron")
    advices = examine(training, H100, budget="100KiB")
    assert advices.of(Kind.OFFLOAD) == ()
    assert Kind.OFFLOAD in advices.examined
    assert "which does not fit" in str(advices)
