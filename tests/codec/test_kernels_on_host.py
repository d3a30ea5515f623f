"""Runs the native check that kernels.cu, compiled as C++, gives the reference's bytes. No GPU is needed."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "build" / "testing" / "codec_kernels_on_host"


@pytest.mark.slow
def test_kernels_give_the_bytes_of_the_reference_when_run_on_the_host() -> None:
    assert PROGRAM.is_file(), f"{PROGRAM} is not built: configure with -DVDNN_BUILD_TESTING=ON and build"
    done = subprocess.run([PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    score = re.fullmatch(r"(\d+) passed, 0 failed", done.stdout.strip())
    assert score is not None, done.stdout
    assert int(score[1]) > 4_000, done.stdout
