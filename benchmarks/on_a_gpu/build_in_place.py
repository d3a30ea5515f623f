"""Part of gpu-proof: builds vdnn in place, and falls back to less where the whole cannot be built.

First with what the tests need, then without, then without device code as well, then without pyproject.toml, which an
old setuptools cannot read. Each try is shown whole. The exit code is 0 if the native core can be imported afterwards,
and the last line says which try built it. Nothing is installed.
`--as-it-is` builds nothing and imports what is there, to try the program.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Try:
    """One way to build. With `aside`, setup.py runs in an empty folder, and the core is copied from there."""

    name: str
    settings: dict[str, str]
    aside: bool = False


TRIES = (
    Try("with the tests' native parts", {"VDNN_BUILD_TESTING": "ON"}),
    Try("without the tests' native parts", {"VDNN_BUILD_TESTING": "OFF"}),
    Try("without device code, so that codecs do not run on a GPU", {"VDNN_BUILD_TESTING": "OFF", "VDNN_NVCC": "OFF"}),
    Try("without pyproject.toml", {"VDNN_BUILD_TESTING": "ON"}, aside=True),
)
_IMPORT = "from vdnn import _C; print(_C.__file__, _C.device_code_missing_reason() or 'with device code')"


def imports() -> bool:
    return subprocess.run([sys.executable, "-c", _IMPORT], cwd=ROOT).returncode == 0


def build(one: Try) -> int:
    """Build in that way. Returns the exit code of setup.py."""
    command = [sys.executable, str(ROOT / "setup.py"), "--quiet", "build_ext", "--inplace"]
    environment = {**os.environ, **one.settings}
    if not one.aside:
        return subprocess.run(command, cwd=ROOT, env=environment).returncode
    folder = ROOT / "build" / "aside"
    (folder / "vdnn").mkdir(parents=True, exist_ok=True)
    code = subprocess.run(command, cwd=folder, env=environment).returncode
    for core in folder.glob("vdnn/_C*.so"):
        shutil.copy2(core, ROOT / "vdnn")
    return code


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.on_a_gpu.build_in_place", description=__doc__)
    parser.add_argument("--as-it-is", action="store_true", help="build nothing")
    if parser.parse_args(arguments).as_it_is:
        return 0 if imports() else 1
    for one in TRIES:
        began_s = time.monotonic()
        print(f"--- {one.name} ---", flush=True)
        code = build(one)
        if code == 0 and imports():
            print(f"built {one.name} in {time.monotonic() - began_s:.0f} s")
            return 0
        print(f"exit code {code} after {time.monotonic() - began_s:.0f} s", flush=True)
    return 1


if __name__ == "__main__":
    sys.exit(main())
