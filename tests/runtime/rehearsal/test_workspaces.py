"""Memory that libraries take on the card: in the peaks of a rehearsal, as figures that an H200 measured bear out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import vdnn
from benchmarks import models
from vdnn.errors import BudgetError, InvalidArgumentError
from vdnn.hardware import HardwareProfile, load_profile
from vdnn.hardware.profile_files import with_workspaces
from vdnn.planning.least_memory import least_bytes
from vdnn.runtime.machine.virtual_machine import VirtualMachine
from vdnn.runtime.machine.workspaces import workspace_key
from vdnn.runtime.rehearsal.rehearsal import Rehearsal, Staged, Subject, rehearse

GIB = 2**30
CUBLAS_BYTES = 65 << 20
SUMS_BYTES = 16 << 20
# (network, batch, under autocast, the peak of a plain step on an H200): benchmarks/results/gpu_steps.jsonl, requested
MEASURED = (("resnet50", 128, False, 11277136368), ("gpt2", 16, True, 14571379404))


def rehearsed(make: Callable[[], Any], autocast: bool = False, hardware: str = "h200") -> Rehearsal:
    def staged() -> Staged:
        workload = make()

        def step() -> None:
            with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
                value = workload.loss(workload.model(*workload.inputs))
            value.backward()

        return Staged(workload.model, step, workload.inputs)

    return rehearse(Subject(staged), hardware)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "batch", "autocast", "measured"), MEASURED)
def test_a_predicted_peak_is_the_measured_one_and_not_below(
    name: str, batch: int, autocast: bool, measured: int
) -> None:
    predicted = rehearsed(lambda: getattr(models, name)(batch), autocast).recording.peak_bytes
    assert measured <= predicted <= measured + 1024


@pytest.mark.slow
def test_vgg_needs_what_an_h200_said_whatever_moves() -> None:
    recording = rehearsed(lambda: models.vgg16(128)).recording
    assert 10.055 <= recording.peak_bytes / GIB <= 10.07  # 10.06 were measured
    assert 8.825 <= least_bytes(recording) / GIB <= 8.85  # 8.83


@pytest.mark.slow
def test_vgg_at_three_quarters_is_refused_and_the_workspace_is_named() -> None:
    with pytest.raises(BudgetError, match=r"the largest up to 3\.08 GiB of cuDNN in convolution_backward, float32"):
        vdnn.plan(models.vgg16, 128, hardware="h200", budget=int(0.75 * 10.06 * GIB))


def peaks_of_a_convolution(
    channels: int = 16, *, hardware: str | HardwareProfile = "h200", workspaces: bool = True, **options: Any
) -> tuple[int, int]:
    """The peaks of the forward and the backward pass, beside what is alive after each."""
    with VirtualMachine(hardware, workspaces=workspaces) as machine:
        weight = torch.empty(16, channels, 3, 3, requires_grad=True, dtype=options.get("dtype"))
        x = torch.empty(4, channels, 32, 32).to(**options).requires_grad_()
        machine.reset_peak()
        y = functional.conv2d(x, weight, padding=1)
        forward = machine.peak_bytes - machine.allocated_bytes
        gradient = torch.empty_like(y)
        machine.reset_peak()
        torch.autograd.grad(y, (x, weight), gradient)
        return forward, machine.peak_bytes - machine.allocated_bytes


MAP_BYTES = 4 * 16 * 32 * 32 * 4
WEIGHT_BYTES = 16 * 16 * 9 * 4


def test_a_convolution_on_tensor_cores_takes_copies_of_two_maps() -> None:
    # The gradients of input and weight are released as soon as the call returns.
    results = MAP_BYTES + WEIGHT_BYTES
    assert peaks_of_a_convolution() == (2 * MAP_BYTES, 2 * MAP_BYTES + SUMS_BYTES + results)
    assert peaks_of_a_convolution(workspaces=False) == (0, results)


def test_channels_are_converted_in_blocks_of_16_bytes() -> None:
    forward, _ = peaks_of_a_convolution(3)
    assert forward == MAP_BYTES + MAP_BYTES // 16 * 4
    forward, _ = peaks_of_a_convolution(3, dtype=torch.bfloat16)
    assert forward == MAP_BYTES // 2 + MAP_BYTES // 2 // 16 * 8


@pytest.mark.parametrize("given", [{"hardware": "titan-x"}, {"memory_format": torch.channels_last}])
def test_what_is_not_converted_takes_no_copies(given: dict[str, Any]) -> None:
    assert peaks_of_a_convolution(**given)[0] == 0


def test_the_memory_that_cublas_keeps_is_resident() -> None:
    with VirtualMachine("h200", workspaces=True) as machine:
        assert machine.allocated_bytes == CUBLAS_BYTES
    with VirtualMachine("h200") as machine:
        assert machine.allocated_bytes == 0


def test_a_report_states_what_libraries_take() -> None:
    def build(batch: int) -> Any:
        return nn.Sequential(nn.Conv2d(8, 64, 3), nn.ReLU(), nn.Conv2d(64, 64, 3)), torch.empty(batch, 8, 64, 64)

    report = vdnn.plan(build, 16, hardware="h200")
    assert report.as_json()["libraries"]["cublas_bytes"] == CUBLAS_BYTES
    said = str(report)
    assert "libraries: peaks include workspaces, the largest up to " in said
    assert "65.00 MiB that cuBLAS keeps; CUDA's context takes up to 768.00 MiB beside the budget" in said
    assert "libraries:" not in str(vdnn.plan(build, 16, hardware="titan-x"))


def measured_profile(folder: Path, workspaces: dict[str, int]) -> HardwareProfile:
    path = folder / "h200.json"
    path.write_text(with_workspaces("h200", workspaces, "a test"))
    return load_profile(path)


CALL = "convolution float32 4x16x32x32 16x16x3x3 1x1 1x1 1x1 0x0 0 1"


@pytest.mark.parametrize("nbytes", [0, 12345])
def test_a_measured_workspace_comes_before_a_computed_one(nbytes: int, tmp_path: Path) -> None:
    profile = measured_profile(tmp_path, {CALL: nbytes})
    assert profile.workspaces == {CALL: nbytes}
    assert profile.source_of(f"workspaces.{CALL}") == "a test"
    forward, backward = peaks_of_a_convolution(hardware=profile)
    assert forward == nbytes
    assert backward == peaks_of_a_convolution()[1]


def test_a_call_is_named_by_all_that_its_algorithm_depends_on() -> None:
    x, weight = torch.empty(2, 8, 6, 6), torch.empty(4, 8, 3, 3)
    rest = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    calls = {
        workspace_key("convolution", (x, weight, None, *rest)),
        workspace_key("convolution", (x.bfloat16(), weight.bfloat16(), None, *rest)),
        workspace_key("convolution", (x.to(memory_format=torch.channels_last), weight, None, *rest)),
        workspace_key("convolution", (x, weight, None, [2, 2], *rest[1:])),
        workspace_key("convolution", (x, weight, None, *rest[:-1], 2)),
        workspace_key("convolution_transpose", (x, weight, None, *rest)),
    }
    assert len(calls) == 6


@pytest.mark.parametrize("nbytes", [-1, 1 << 60, True, 0.5])
def test_an_impossible_workspace_is_refused_in_one_sentence(nbytes: Any, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"workspaces\.mm: expected a whole number from 0, and less than"):
        measured_profile(tmp_path, {"mm": nbytes})


def test_a_table_is_of_a_profile_that_exists() -> None:
    with pytest.raises(InvalidArgumentError, match="hardware profile"):
        with_workspaces("nothing", {}, "a test")
