"""The hooks of recorded and measured steps read what a GPU's statistics take long to tell as rarely as they can."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import vdnn
from benchmarks.core.host_ways import CountedGauges, counted_gauges
from tests.runtime.rigs.networks import conv_chain, images
from vdnn import _C
from vdnn.runtime.machine.gauges import Peaks, VirtualGauges
from vdnn.runtime.machine.virtual_machine import VirtualMachine
from vdnn.runtime.recompute.trial import Trial
from vdnn.runtime.steps.steps import StepWatch
from vdnn.runtime.steps.watched_step import ObservedHook

_MOST_BETWEEN_STEPS = 16


@pytest.mark.parametrize("recompute", [False, True])
def test_a_hook_of_a_recorded_step_reads_statistics_once_and_makes_one_mark(*, recompute: bool) -> None:
    model, x = conv_chain(), images()
    with (
        counted_gauges(),
        vdnn.offload("keep", device=_C.SimDevice(), recompute=recompute, measure=True, min_bytes=0) as session,
    ):
        for _ in range(2):  # recipes are tried in the first one
            before = CountedGauges.readings, CountedGauges.marks
            model(x).square().sum().backward()
            session.step()
        assert session.recording is not None
        points = len(session.recording.points)
        assert points > _MOST_BETWEEN_STEPS
        assert CountedGauges.readings - before[0] <= points + _MOST_BETWEEN_STEPS
        assert CountedGauges.marks - before[1] <= points + _MOST_BETWEEN_STEPS


def test_a_trial_of_a_first_step_reads_statistics_once_and_those_of_its_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """If there is room for a trial, and what is allocated behind it, is known from the readings of its hook."""
    unmeasured, measured = list[Trial](), list[Trial]()
    run = Trial.run

    def noted(trial: Trial) -> torch.Tensor:
        (unmeasured if trial._gauges is None else measured).append(trial)
        return run(trial)

    monkeypatch.setattr(Trial, "run", noted)
    model, x = conv_chain(), images()
    with counted_gauges(), vdnn.offload(device=_C.SimDevice(), budget="1GiB", min_bytes=0) as session:
        before = CountedGauges.readings
        model(x).square().sum().backward()
        session.step()
        readings = CountedGauges.readings - before
    steps = session._engine.steps
    assert isinstance(steps, StepWatch)
    recording = steps.recording
    assert recording is not None
    assert len(unmeasured) >= 4
    assert len(measured) >= 8, "each runs twice"
    of_trials = len(unmeasured) + len(measured) // 2 + 2 * len(measured)
    assert readings <= len(recording.points) + of_trials + _MOST_BETWEEN_STEPS


def test_sessions_that_plan_on_two_devices_share_nothing() -> None:
    with counted_gauges():
        sessions = [vdnn.offload(device=device, budget="1GiB") for device in (_C.SimDevice(), _C.SimDevice())]
        sessions.append(vdnn.offload(budget="1GiB"))
        for session in sessions:
            with session:
                pass
    assert len({id(session._engine) for session in sessions}) == 3


OPTIONS: dict[str, dict[str, Any]] = {
    "keep": {"policy": "keep"},
    "vdnn-all": {"policy": "vdnn-all"},
    "recompute-all": {"policy": "recompute-all"},
    "integrity": {"policy": "vdnn-all", "integrity": True},
    "narrow windows": {"policy": "vdnn-all", "limits": vdnn.Limits(offload_window=1 << 10, reload_window=1 << 10)},
    "a budget": {"budget": "20KiB"},
    "the least budget": {"budget": "min"},
    "the least budget, moves alone": {"budget": "min", "recompute": False},
    "rechecks in each step": {"budget": "min", "recheck": 1},
}


def train_measured(options: dict[str, Any]) -> None:
    with VirtualMachine("titan-x", fake=False) as machine:
        torch.manual_seed(0)
        model, x = conv_chain(), images()
        with vdnn.offload(device=machine, measure=True, min_bytes=0, **options) as session:
            for _ in range(5):
                model(x).square().sum().backward()
                session.step()


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_hook_that_says_that_it_has_changed_no_memory_has_not(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU's statistics are not read again behind it. Trials count by themselves, and leave nothing allocated."""
    allocated, unchanged, trials = [0], list[bool](), list[Trial]()
    begin, end, run = VirtualGauges.hook_begins, VirtualGauges.hook_ends, Trial.run

    def noted(trial: Trial) -> torch.Tensor:
        trials.append(trial)
        return run(trial)

    def begins(self: VirtualGauges) -> Peaks:
        peaks = begin(self)
        allocated[0] = peaks.allocated_bytes
        return peaks

    def ends(self: VirtualGauges, *, has_changed: bool) -> Peaks:
        peaks = end(self, has_changed=has_changed)
        if not has_changed:
            is_peak_same = peaks.peak_bytes == allocated[0] or bool(trials)
            unchanged.append(peaks.allocated_bytes == allocated[0] and is_peak_same)
        trials.clear()
        return peaks

    monkeypatch.setattr(Trial, "run", noted)
    monkeypatch.setattr(VirtualGauges, "hook_begins", begins)
    monkeypatch.setattr(VirtualGauges, "hook_ends", ends)
    train_measured(options)
    assert unchanged
    assert all(unchanged)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_time_of_a_hook_that_says_that_it_is_idle_stands_still(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU is not marked again behind it."""
    still, end = list[bool](), ObservedHook.end

    def ends(self: ObservedHook) -> None:
        if self.is_idle:
            still.append(self._gauges.mark(self._stream) == self._begin)
        end(self)

    monkeypatch.setattr(ObservedHook, "end", ends)
    train_measured(options)
    assert still
    assert all(still)
