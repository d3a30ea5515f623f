"""The native core and all modules compile for the oldest Python that the package accepts, where its headers are."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_OLDEST = re.search(r'requires-python = ">=(3\.\d+)"', (ROOT / "pyproject.toml").read_text())
assert _OLDEST is not None
OLDEST = _OLDEST[1]


def prefix_of_the_oldest() -> Path:
    """The folder of that Python: the system's, or one that was installed beside this Python."""
    beside = sorted(Path(sys.base_prefix).parent.glob(f"{OLDEST}*"))
    for prefix in (*beside, Path("/usr"), Path("/usr/local")):
        if (prefix / f"include/python{OLDEST}/Python.h").is_file():
            return prefix
    pytest.skip(f"this machine has no headers of Python {OLDEST}")


def test_what_calls_python_compiles_for_the_oldest_python() -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("this machine has no g++")
    headers = prefix_of_the_oldest() / f"include/python{OLDEST}"
    sources = sorted(map(str, (ROOT / "csrc/hooks").glob("*.cpp")))
    assert sources
    done = subprocess.run(
        [compiler, "-std=c++17", "-fsyntax-only", "-I", str(ROOT / "csrc"), "-I", str(headers), *sources],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_every_module_is_python_of_the_oldest_version() -> None:
    python = prefix_of_the_oldest() / f"bin/python{OLDEST}"
    if not python.is_file():
        pytest.skip(f"this machine has headers of Python {OLDEST}, and not {python}")
    program = "import ast, sys; [ast.parse(open(one, encoding='utf-8').read(), one) for one in sys.argv[1:]]"
    modules = [str(path) for folder in ("vdnn", "benchmarks", "examples") for path in (ROOT / folder).rglob("*.py")]
    done = subprocess.run([str(python), "-c", program, *modules], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
