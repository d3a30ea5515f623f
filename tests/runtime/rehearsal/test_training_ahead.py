"""vdnn.plan_training says what lives where, and refuses a host or a card that is too small with both numbers."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import vdnn
from tests.runtime.rehearsal.test_rehearsed_training import BLOCK_WEIGHTS, LAYERS, words
from vdnn.errors import BudgetError, InvalidArgumentError
from vdnn.hardware import load_profile
from vdnn.planning.training.least_placement import with_layers
from vdnn.runtime.rehearsal.rehearsal import subject_of
from vdnn.runtime.rehearsal.rehearsed_training import rehearse_training
from vdnn.runtime.rehearsal.training_ahead import planned_training, terms_of

TIGHT: dict[str, Any] = {"hardware": "rtx-4090", "optimizer": "adamw"}
MIB = 1 << 20


def test_with_room_everything_stays_and_nothing_is_slower() -> None:
    report = vdnn.plan_training(words, 8, **TIGHT)
    assert (report.to_device_bytes, report.to_host_bytes, report.host_bytes) == (0, 0, 0)
    assert report.slowdown == 1.0
    assert report.gap is not None
    assert abs(report.gap) < 1e-4
    assert report.peak_bytes == report.kept_peak_bytes


def test_under_a_budget_what_leaves_crosses_the_link_and_is_in_the_table() -> None:
    kept = vdnn.plan_training(words, 8, **TIGHT)
    report = vdnn.plan_training(words, 8, **TIGHT, budget=kept.kept_peak_bytes * 6 // 10)
    assert report.peak_bytes <= report.budget_bytes
    assert report.host_bytes > 0
    assert report.step_ns >= report.computing_ns
    assert report.bound_ns is not None
    assert report.bound_ns <= report.step_ns
    assert sum(one.to_device_bytes for one in report.units) == report.to_device_bytes
    assert sum(one.to_host_bytes for one in report.units) == report.to_host_bytes
    assert sum(one.count for one in report.units) == LAYERS + 2
    assert sum(one.state_bytes for one in report.units) == report.state_bytes
    text = str(report)
    assert "certified" in text
    assert "layers." in text
    for span in report.spans:
        assert span.end_ns <= report.step_ns + 1
    assert max(one.moving_bytes for one in report.memory) > 0


def test_a_report_is_saved_and_loaded_whole(tmp_path: Path) -> None:
    report = vdnn.plan_training(words, 8, **TIGHT, micro_batches=2, clip=True)
    report.save(tmp_path / "plan.json")
    assert vdnn.TrainingReport.load(tmp_path / "plan.json") == report
    assert report.as_json()["version"] == 1
    assert (report.micro_batches, report.clips) == (2, True)


@pytest.mark.slow
def test_what_changes_bits_is_planned_only_if_it_is_named() -> None:
    report = vdnn.plan_training(words, 8, **TIGHT, budget="min", host="1GiB")
    assert report.allowed == ()
    assert not any("CPU" in one.optimizer for one in report.units)
    with pytest.raises(ValueError, match="allow: expected some of cpu-step, deferred, in-backward, got 'gpu-step'"):
        vdnn.plan_training(words, 8, **TIGHT, allow=("gpu-step",))
    with pytest.raises(ValueError, match="expected no 'in-backward' with clip, got both"):
        vdnn.plan_training(words, 8, **TIGHT, allow=("in-backward",), clip=True)


@pytest.mark.slow
def test_a_host_that_is_too_small_is_refused_with_the_layers_that_would_do() -> None:
    least = 4 * BLOCK_WEIGHTS * 4  # parameters, gradients and two moments of one layer
    with pytest.raises(InvalidArgumentError) as refused:
        vdnn.plan_training(words, 8, **TIGHT, budget="min", host=3 * least)
    found = re.fullmatch(
        r"host: expected .* \((\d+) bytes\) of memory for words under .* of the device, got .*, "
        r"which would do for (\d) of the 4 layers\.",
        str(refused.value),
    )
    assert found is not None, str(refused.value)
    needed, layers = int(found[1]), int(found[2])
    assert layers < LAYERS
    assert needed > 3 * least
    vdnn.plan_training(words, 8, **TIGHT, budget="min", host=needed)
    terms = terms_of("rtx-4090", budget="min", host=3 * least)
    whole = rehearse_training(subject_of(words, 8), load_profile("rtx-4090"), name="words", optimizer="adamw")
    named = replace(whole, training=with_layers(whole.training, whole.blocks, layers))
    assert planned_training(named, terms, batch=8, optimizer="adamw").host_bytes <= 3 * least


def test_a_card_that_is_too_small_is_refused_with_the_least() -> None:
    with pytest.raises(BudgetError) as refused:
        vdnn.plan_training(words, 8, **TIGHT, budget="1MiB")
    least = refused.value.least_bytes
    assert vdnn.plan_training(words, 8, **TIGHT, budget=least).peak_bytes <= least


def test_a_profile_without_a_host_needs_one() -> None:
    with pytest.raises(ValueError, match="because the profile 'titan-x' has no host"):
        terms_of("titan-x")
    terms = terms_of("titan-x", host="64GiB")
    rehearsed = rehearse_training(subject_of(words, 8), load_profile("titan-x"), name="words", optimizer="sgd")
    report = planned_training(rehearsed, terms, batch=8, optimizer="sgd")
    assert "no figures of its host" in report.notes[0]


def test_cores_limit_the_rate_of_steps_on_the_cpu() -> None:
    assert terms_of("rtx-4090", host_cores=2).machine.cpu_bytes_per_s == 2 * 11_500_000_000
    every = load_profile("rtx-4090").host["step_bytes_per_s"]
    assert terms_of("rtx-4090").machine.cpu_bytes_per_s == every
    with pytest.raises(ValueError, match="host_cores: expected a number, 1 or more, got 0"):
        terms_of("rtx-4090", host_cores=0)
