"""Memory that torch's allocator reserves for a planned step: beside what an H200 reserved, and in the report."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import vdnn
from benchmarks import models
from tests.runtime.rehearsal.programs import perceptron
from vdnn.hardware import load_profile
from vdnn.planning.catalogue import make_planner
from vdnn.planning.costs import profile_costs
from vdnn.planning.planned_step import plan_step
from vdnn.report.plan_report import RESERVED_MORE, LibraryMemory
from vdnn.runtime.rehearsal.rehearsal import Staged, Subject, rehearse

GIB = 2**30


# Plain steps on an H200: benchmarks/results/gpu_steps.jsonl, `reserved_bytes`
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "batch", "autocast", "measured"),
    [("resnet50", 128, False, 13698596864), ("gpt2", 16, True, 16322134016)],
)
def test_a_replay_reserves_what_an_h200_did_within_the_margin(
    name: str, batch: int, autocast: bool, measured: int
) -> None:
    def staged() -> Staged:
        workload = getattr(models, name)(batch)

        def step() -> None:
            with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
                value = workload.loss(workload.model(*workload.inputs))
            value.backward()

        return Staged(workload.model, step, workload.inputs)

    card = load_profile("h200")
    recording = rehearse(Subject(staged), card).recording
    planned = plan_step(recording, profile_costs(card), card.memory_bytes, make_planner("auto"), certify=False)
    reserved = rehearse(Subject(staged), card, plan=planned.plan).reserved
    assert reserved is not None
    assert measured / (1 + RESERVED_MORE) <= reserved.in_segments <= 1.01 * measured
    assert recording.peak_bytes < reserved.in_expandable_segments < reserved.in_segments


def test_a_report_says_what_torch_reserves() -> None:
    report = vdnn.plan(perceptron, 4096, hardware="titan-x")
    fixed, expandable = report.libraries.reserved_bytes, report.libraries.reserved_expandable_bytes
    assert fixed is not None
    assert expandable is not None
    assert report.planned.timeline.peak_bytes <= expandable <= fixed
    assert "torch reserves" in str(report)
    assert "WARNING" not in str(report)
    assert report.as_json()["libraries"]["reserved_bytes"] == fixed


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"reserved_bytes": 70 * GIB}, ""),
        ({"reserved_bytes": 73 * GIB}, "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"),
        ({"reserved_bytes": 79 * GIB, "reserved_expandable_bytes": 78 * GIB}, "a smaller budget leaves room"),
    ],
)
def test_a_card_that_may_run_out_is_warned_of(given: dict[str, Any], expected: str) -> None:
    roomy = LibraryMemory(0, "", 0, GIB, 70 * GIB, 70 * GIB, 80 * GIB)
    said = replace(roomy, **given).reservation
    assert ("WARNING" in said) == bool(expected)
    assert said.endswith(expected)


def test_a_plan_that_did_not_run_says_nothing_of_it() -> None:
    assert LibraryMemory(0, "", 0, 0).reservation == ""
