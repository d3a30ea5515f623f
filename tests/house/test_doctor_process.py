"""The doctor as a user runs it, on this machine, whatever hardware it has."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import NoReturn

import pytest

from tests.fake_driver.control import FakeDriver
from tests.house.without_torch import ROOT, python_without_torch
from tests.patience import run_to_its_end
from vdnn.doctor import Sources, examine


@pytest.mark.slow
def test_the_doctor_reports_on_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    done = run_to_its_end([sys.executable, "-m", "vdnn", "doctor", "--json"], cwd=ROOT, check=True)
    report = json.loads(done.stdout)
    assert done.stderr == ""
    assert report["extension"]["present"] is True
    assert report["torch"]["usable"] is True
    assert report["host"]["problem"] is None
    assert report["host"]["total_bytes"] >= report["host"]["available_bytes"] > 0
    assert report["issue"]["problem"] is None
    assert report["issue"]["measured"]["recompute_ns"] > 0
    assert {codec["kernel"] for codec in report["codecs"]} >= {"pack_bits", "unpack_bits", "content_hash"}


def test_the_doctor_measures_the_link_of_a_device_it_can_open(fake_driver: FakeDriver) -> None:
    def unmeasured() -> NoReturn:
        raise LookupError("it is not asked for here")

    report = examine(Sources(library=str(fake_driver.path), host=unmeasured))
    (gpu,) = report.gpus
    assert gpu.problem is None
    assert gpu.link is not None
    assert gpu.link.to_host_bytes_per_s > 0
    assert gpu.link.both_ways_bytes_per_s > 0


def test_the_doctor_works_where_torch_cannot_be_imported(tmp_path: Path) -> None:
    done = python_without_torch(tmp_path, "-m", "vdnn", "doctor")
    assert done.returncode == 0, done.stderr
    assert "torch         missing:" in done.stdout
    assert "Without torch no training step can be run" in done.stdout
    # A path is never wrapped, so that it can be copied.
    assert max(len(line) for line in done.stdout.splitlines() if "/" not in line) <= 80


def test_the_doctor_works_where_the_native_core_cannot_be_imported(tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules['vdnn._C'] = None; "
        "from vdnn.cli.main import main; sys.exit(main(['doctor', '--json']))"
    )
    done = python_without_torch(tmp_path, "-c", program)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["extension"]["present"] is False
    assert report["meanings"][0].startswith("Without the native core")
