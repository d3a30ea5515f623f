"""Source that was not built says so and how to build it: users who install a copy and stay in its folder see this
first."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.patience import run_to_its_end

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def unbuilt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package as it is in the source."""
    folder = tmp_path_factory.mktemp("source")
    shutil.copytree(ROOT / "vdnn", folder / "vdnn", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    return folder


def started(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs Python without the finder of `pip install --editable`, which would find the core of that installation."""
    environment = {**os.environ, "PYTHONPATH": sysconfig.get_path("purelib")}
    command = [sys.executable, "-S", *arguments]
    return run_to_its_end(command, cwd=folder, env=environment)


@pytest.mark.slow
def test_touching_what_needs_the_core_says_where_it_is_missing_and_what_to_do(unbuilt: Path) -> None:
    done = started(unbuilt, "-c", "import vdnn\nvdnn.offload")
    assert done.stderr.splitlines()[-1] == (
        "vdnn.errors.CoreMissingError: this part of vdnn needs its native core, which is not in "
        f"{unbuilt / 'vdnn'}: that is source that was not built. Run Python in another folder to use the installed "
        "vdnn, or run `make build` there."
    )
    done = started(unbuilt, "-m", "vdnn", "plan", "a:b", "--batch", "1")
    assert (done.returncode, done.stderr.startswith("vdnn plan: this part of vdnn needs its native core")) == (2, True)


def test_importing_vdnn_needs_no_core(unbuilt: Path) -> None:
    assert started(unbuilt, "-c", "import vdnn; print(vdnn.__version__)").returncode == 0
