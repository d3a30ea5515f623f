"""The host of this machine, measured: what its figures are, that they are kept, and that plans are made for it."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import vdnn
from tests.runtime.rehearsal.programs import perceptron
from vdnn.cli.main import main
from vdnn.errors import InvalidArgumentError, VdnnError
from vdnn.hardware import HostFigures, load_profile
from vdnn.hardware.measured_host import MeasuredHost, keep_host, kept_host
from vdnn.runtime.rehearsal import host_probe
from vdnn.step.plan import Action

HOST = MeasuredHost("this one", 1_000, None, 2_000, 3_000, 5_000, 6_000, 100)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder of the user, which does not exist yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def measurements(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A machine that is quickly measured. The list has an entry for each time."""
    found: list[str] = []

    def measured(turns: int) -> MeasuredHost:
        found.append(f"{turns} turns")
        return HOST

    monkeypatch.setattr(host_probe, "_machine", lambda: HOST.machine)
    monkeypatch.setattr(host_probe, "_measured", measured)
    return found


def test_this_machine_is_measured_and_left_as_it_was(cache: Path, recwarn: pytest.WarningsRecorder) -> None:
    threads, numbers = torch.get_num_threads(), torch.get_rng_state()
    host = host_probe.measured_host(turns=2)
    assert (host.launch_ns is None) is not torch.cuda.is_available()
    assert host.operation_ns > 1
    assert host.event_ns > 1
    assert kept_host(host.machine) == host
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), numbers)
    assert not recwarn.list


def test_steps_that_do_not_follow_their_plan_measure_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = host_probe._plan
    monkeypatch.setattr(host_probe, "_plan", lambda recording, moved, _: make(recording, moved, Action.KEEP))
    with pytest.raises(VdnnError, match="the host cannot be measured: expected .* copies of the plan, got 0"):
        host_probe.measured_host(turns=1)
    assert not cache.exists()


def test_the_figures_of_a_plan_are_those_measured_with_the_launch_of_the_profile() -> None:
    with_host, without = load_profile("h200"), load_profile("titan-x")
    assert HOST.figures(with_host) == HostFigures(1_000, with_host.issue_ns["launch"], 2_000, 4_000, 6_000)
    assert HOST.figures(without) == HostFigures(1_000, 0, 2_000, 4_000, 6_000)
    assert replace(HOST, launch_ns=700).figures(with_host).launch_ns == 700
    with pytest.raises(InvalidArgumentError, match="event_ns"):
        replace(HOST, event_ns=0)


def test_a_machine_is_measured_once_and_then_its_figures_are_kept(cache: Path, measurements: list[str]) -> None:
    profile = load_profile("titan-x")
    assert host_probe.host_of(profile, "measured") == host_probe.host_of(profile, "measured") == HOST.figures(profile)
    assert len(measurements) == 1


def test_the_figures_of_another_machine_are_not_used(cache: Path) -> None:
    keep_host(HOST)
    assert kept_host("this one") == HOST
    assert kept_host("another one") is None
    (path,) = (cache / "vdnn").iterdir()
    path.write_text(path.read_text().replace("this one", "copied from elsewhere"))
    assert kept_host("this one") is None


@pytest.mark.parametrize("damage", ["", "{", '{"form": "vdnn plan"}', "cut", "zero"])
def test_damaged_figures_cost_one_sentence_and_are_measured_again(
    cache: Path, measurements: list[str], damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    keep_host(HOST)
    (path,) = (cache / "vdnn").iterdir()
    content = path.read_text()
    changed = {"cut": content[:-9], "zero": content.replace('"event_ns":100', '"event_ns":0')}
    path.write_text(changed.get(damage, damage))
    report = vdnn.plan(perceptron, 4096, hardware="titan-x", host_speed="measured")
    assert " to issue the step, " in str(report)
    (said,) = caplog.messages
    assert "The host is measured again" in said
    assert len(measurements) == 1
    assert kept_host(HOST.machine) == HOST


def test_figures_that_cannot_be_kept_cost_one_sentence(
    cache: Path, measurements: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    cache.write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING, "vdnn"):
        report = vdnn.plan(perceptron, 4096, hardware="titan-x", host_speed="measured")
    assert " to issue the step, " in str(report)
    assert [one for one in caplog.messages if "cannot be kept" in one]
    assert len(measurements) == 1


def test_the_command_plans_for_the_measured_host(
    cache: Path, measurements: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["plan", "tests.runtime.rehearsal.programs:perceptron", "--batch", "4096", "--hardware", "titan-x"]
    assert main([*arguments, "--json", "--no-bound", "--host-speed", "measured"]) == 0
    assert json.loads(capsys.readouterr().out)["predicted"]["host_ns"] > HOST.operation_ns
    assert len(measurements) == 1
    with pytest.raises(SystemExit) as refused:
        main([*arguments, "--host-speed", "fast"])
    assert refused.value.code == 2
    assert "--host-speed: expected a number or 'measured', got 'fast'" in capsys.readouterr().err
    with pytest.raises(InvalidArgumentError, match="a number above zero, or 'measured'"):
        vdnn.plan(perceptron, 8, host_speed="fast")


def test_a_whole_training_is_planned_for_the_measured_host(cache: Path, measurements: list[str]) -> None:
    report = vdnn.plan_training(
        perceptron, 4096, hardware="titan-x", host="8GiB", optimizer="adamw", budget="min", host_speed="measured"
    )
    assert report.issue_ns > 0
    assert len(measurements) == 1
