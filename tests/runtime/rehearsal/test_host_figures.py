"""The host in a rehearsal: what it issues is counted, planned with, and said in the report."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

import vdnn
from tests.runtime.rehearsal.programs import perceptron
from vdnn.cli.main import main
from vdnn.errors import InvalidArgumentError
from vdnn.hardware import HardwareProfile, HostFigures, load_profile
from vdnn.planning.recomputing import candidates_of
from vdnn.runtime.machine.virtual_machine import VirtualMachine
from vdnn.runtime.rehearsal.rehearsal import rehearse, subject_of
from vdnn.step.recording import Recording

PERCEPTRON = "tests.runtime.rehearsal.programs:perceptron"
FIGURES = {"operation": 10, "launch": 100, "save": 1_000, "copy": 10_000, "recompute": 100_000}


def with_host(profile: HardwareProfile, times: int = 1) -> HardwareProfile:
    sources = dict.fromkeys((f"issue_ns.{name}" for name in FIGURES), "by hand")
    figures = {name: value * times for name, value in FIGURES.items()}
    return replace(profile, issue_ns=figures, sources={**profile.sources, **sources})


def recorded(**figures: int) -> Recording:
    host = HostFigures(**{f"{name}_ns": figures.get(name, 0) for name in FIGURES})
    return rehearse(subject_of(perceptron, 4096, None), "titan-x", host=host).recording


def test_a_machine_counts_what_the_host_issues_and_launches() -> None:
    with VirtualMachine(with_host(load_profile("titan-x")), host=HostFigures(1, 1000, 0, 0, 0)) as machine:
        x = torch.empty(8)
        begin = machine.issued_ns
        torch.relu(x.view(2, 4))  # a view, and an operation with one launch
        assert machine.issued_ns - begin == 2 * 1 + 1000
    with VirtualMachine("titan-x") as machine:
        torch.relu(torch.empty(8))
        assert machine.issued_ns == 0


def test_a_rehearsed_step_is_issued_between_its_points() -> None:
    launches = recorded(launch=1)
    saves = recorded(save=1).issue_ns
    # Eight layers of a product and its bias with an activation in between, the loss, and the same backward: the launch
    # of each is in the interval that computes it.
    assert launches.has_host
    assert all(bool(point.issue_ns) is bool(point.compute_ns) for point in launches.points)
    assert saves >= len({point.lifetime for point in launches.points if point.key is not None})
    assert recorded(launch=1, save=1).issue_ns == launches.issue_ns + saves
    assert not recorded().has_host


def test_a_recompute_costs_its_operations_and_its_proof() -> None:
    launched, proven = recorded(launch=1), recorded(launch=1, recompute=1000)
    for index in candidates_of(launched):
        before, after = launched.lifetimes[index].recompute, proven.lifetimes[index].recompute
        assert before is not None
        assert after is not None
        assert before.issue_ns >= 1
        assert after.issue_ns == before.issue_ns + 1000
    assert candidates_of(launched)


def _reads_its_loss(batch: int) -> tuple[torch.nn.Module, torch.Tensor, object]:
    model, x = perceptron(batch)

    def loss(output: torch.Tensor) -> torch.Tensor:
        found = output.square().mean()
        found.item()
        return found

    return model, x, loss


def test_a_program_that_reads_a_value_of_the_device_waits_for_it_in_each_step() -> None:
    host = HostFigures(1, 0, 0, 0, 0)
    assert rehearse(subject_of(_reads_its_loss, 64, None), "titan-x", host=host, min_bytes=0).recording.synchronizes
    assert not rehearse(subject_of(perceptron, 64, None), "titan-x", host=host, min_bytes=0).recording.synchronizes


def test_a_host_is_as_fast_as_asked_and_a_profile_without_one_has_none() -> None:
    profile = with_host(load_profile("titan-x"))
    assert HostFigures.of(profile) == HostFigures(10, 100, 1_000, 10_000, 100_000)
    assert HostFigures.of(profile, 0.5) == HostFigures(20, 200, 2_000, 20_000, 200_000)
    assert HostFigures.of(load_profile("titan-x")) is None
    for speed in (0, -1, float("nan"), float("inf")):
        with pytest.raises(InvalidArgumentError, match="host_speed"):
            HostFigures.of(profile, speed)
    with pytest.raises(InvalidArgumentError, match="all of operation, launch, save, copy, recompute, or none"):
        replace(profile, issue_ns={"operation": 10})
    with pytest.raises(InvalidArgumentError, match=r"issue_ns\.copy"):
        replace(profile, issue_ns={**FIGURES, "copy": -1})
    with pytest.raises(InvalidArgumentError, match="source"):
        replace(profile, sources=load_profile("titan-x").sources)


def test_the_report_says_what_bounds_the_step() -> None:
    titan = load_profile("titan-x")
    alone = vdnn.plan(perceptron, 8192, hardware=titan, budget="min")
    assert "the profile titan-x has no figures of one" in str(alone)
    fast = vdnn.plan(perceptron, 8192, hardware=with_host(titan), budget="min")
    assert fast.planned.timeline.step_ns == alone.planned.timeline.step_ns, "the host is far enough ahead"
    assert " to issue the step, " in str(fast)
    assert "bound by the host" not in str(fast)
    slow = vdnn.plan(perceptron, 8192, hardware=with_host(titan, 1000), budget="min")
    timeline = slow.planned.timeline
    assert timeline.step_ns == timeline.host_ns > alone.planned.timeline.step_ns
    assert f"bound by the host: it needs {timeline.host_ns / 1e6:.2f} ms to issue the step" in str(slow)
    assert "run in virtual time, the device alone" in str(slow)
    assert slow.shown is timeline
    faster = vdnn.plan(perceptron, 8192, hardware=with_host(titan, 1000), budget="min", host_speed=1000)
    assert faster.planned.timeline.step_ns == fast.planned.timeline.step_ns


def test_the_command_takes_the_speed_of_the_host(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", PERCEPTRON, "--batch", "4096", "--hardware", "h200", "--json", "--no-bound"]
    host_ns = []
    for speed in ("1", "4"):
        assert main([*arguments, "--host-speed", speed]) == 0
        host_ns.append(json.loads(capsys.readouterr().out)["predicted"]["host_ns"])
    assert host_ns[1] == pytest.approx(host_ns[0] / 4, rel=0.001)
    assert main([*arguments, "--host-speed", "0"]) == 2
    assert "host_speed" in capsys.readouterr().err


def test_a_whole_training_says_what_its_host_issues() -> None:
    titan, options = load_profile("titan-x"), {"host": "8GiB", "optimizer": "adamw", "budget": "min"}
    alone = vdnn.plan_training(perceptron, 4096, hardware=titan, **options)
    assert alone.issue_ns == 0
    assert "host: needs" not in str(alone)
    slow = vdnn.plan_training(perceptron, 4096, hardware=with_host(titan, 1000), **options)
    assert slow.issue_ns == slow.step_ns > alone.step_ns
    assert "bound by the host: it needs " in str(slow)
    fast = vdnn.plan_training(perceptron, 4096, hardware=with_host(titan), **options)
    assert fast.step_ns == alone.step_ns > fast.issue_ns > 0
    assert "host: needs" in str(fast)
