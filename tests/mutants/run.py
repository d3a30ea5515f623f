"""Which lane finds a fault: python -m tests.mutants.run [--only TEXT] [--lanes test-fast,test] [--report FILE]

Plants each fault of table.py in a copy of the checkout, one after another, and asks the tests of its room, the quick
ones first: those of `make test-fast`, then the rest of `make test`, then the rest of `make test-full`. A fault that
changes C++ is compiled. At the end the tests that found something run without any fault, and have to pass.

A process that has imported torch forks for each question. It takes seconds for each fault, and minutes where none of
the tests of a room finds it. The file of the report is gone on with.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.mutants.table import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[2]
LANES = {"test-fast": "not slow and not full", "test": "slow and not full", "full": "full"}
LIMIT_S = 120  # of a test: one that hangs has found the fault
LIMIT_OF_A_ROOM_S = 600


class Verdict:
    """The first test that fails, for pytest, which loads this as a plugin."""

    def __init__(self) -> None:
        self.failed: str | None = None

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and self.failed is None:
            self.failed = report.nodeid

    @pytest.hookimpl
    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and self.failed is None:
            self.failed = report.nodeid


def asked(copy: Path, tests: list[str], marks: str, stop: bool = True) -> str | None:
    """The name of the first test that fails in the copy, or None."""
    answer = copy / "answer.json"
    answer.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        signal.alarm(LIMIT_OF_A_ROOM_S)
        with contextlib.suppress(BaseException):
            _ask(copy, tests, marks, answer, stop)
        os._exit(0)
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # what the tests started
    if answer.exists():
        failed: str | None = json.loads(answer.read_text())
        return failed
    return None if ended == -signal.SIGALRM else f"the process of the tests ended with {ended}"


def _ask(copy: Path, tests: list[str], marks: str, answer: Path, stop: bool) -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(nothing, descriptor)
    os.chdir(copy)
    for name in [name for name in sys.modules if name.split(".")[0] in ("tests", "vdnn", "benchmarks")]:
        del sys.modules[name]
    sys.path[:] = [str(copy), *(one for one in sys.path if one and Path(one).resolve() != ROOT)]
    os.environ["PYTHONPATH"] = str(copy)
    os.environ["PYTHONDONTWRITEBYTECODE"] = ""
    sys.dont_write_bytecode = False
    verdict = Verdict()
    options = ["-q", "-p", "no:cacheprovider", f"--timeout={LIMIT_S}", *(["-x"] if stop else [])]
    pytest.main([*options, "-m", marks, *tests], plugins=[verdict])
    answer.write_text(json.dumps(verdict.failed))


def copied(folder: Path) -> Path:
    """A copy of the files that git knows, with what the build made."""
    copy = folder / "copy"
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in listed.splitlines():
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
    for built in [*ROOT.glob("vdnn/_C*.so"), *ROOT.glob("build/testing/*")]:
        (copy / built.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(built, copy / built.relative_to(ROOT))
    return copy


# All other paths of the table are in vdnn/.
OUTSIDE_THE_PACKAGE = ("csrc/", "benchmarks/")


def compiled(copy: Path) -> bool:
    environment = {**os.environ, "VDNN_BUILD_TESTING": "ON", "VDNN_NVCC": "OFF"}
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    return subprocess.run(command, cwd=copy, env=environment, capture_output=True, check=False).returncode == 0


def lane_of(copy: Path, mutant: Mutant, lanes: list[str]) -> tuple[str, str | None]:
    """The first lane that finds the fault, and the test."""
    is_native = mutant.path.startswith("csrc/")
    path = copy / (mutant.path if mutant.path.startswith(OUTSIDE_THE_PACKAGE) else f"vdnn/{mutant.path}")
    text = path.read_text()
    if text.count(mutant.anchor) != 1:
        return "error", f"the anchor is there {text.count(mutant.anchor)} times"
    write(path, text.replace(mutant.anchor, mutant.fault))
    try:
        if is_native and not compiled(copy):
            return "error", "it does not compile"
        tests = [f"tests/{one}" for one in mutant.tests.split() if (copy / "tests" / one).exists()]
        for lane in lanes:
            if failed := asked(copy, tests, LANES[lane]):
                return lane, failed
        return "none", None
    finally:
        write(path, text)


_seconds = itertools.count(int(time.time()))


def write(path: Path, text: str) -> None:
    """Writes a file. Python's has a time that no earlier version of it has: bytecode is found by size and second. That
    of C++ has to be later than what was compiled."""
    path.write_text(text)
    if path.suffix == ".py":
        now = next(_seconds)
        os.utime(path, (now, now))


def known_in(report: Path | None) -> set[tuple[str, ...]]:
    if report is None or not report.exists():
        return set()
    return {tuple(json.loads(line)[:3]) for line in report.read_text().splitlines()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--only", default="", help="mutants whose path has this text")
    parser.add_argument("--lanes", default=",".join(LANES), help="the lanes that are asked, the quickest first")
    parser.add_argument("--report", type=Path, help="a file for one line of JSON for each")
    options = parser.parse_args()
    torch.manual_seed(0)
    lanes: Counter[str] = Counter()
    found: set[str] = set()
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        copy, was_native = copied(Path(folder)), False
        known = known_in(options.report)
        for mutant in [one for one in MUTANTS if options.only in one.path and one[:3] not in known]:
            lane, failed = lane_of(copy, mutant, options.lanes.split(","))
            was_native |= mutant.path.startswith("csrc/")
            lanes[lane] += 1
            wrong += lane == "error"
            if failed and "::" in failed:
                found.add(failed)
            print(f"{lane:10} {mutant.path}: {mutant.fault[:50]} <- {failed}", flush=True)
            if options.report:
                with options.report.open("a") as file:
                    file.write(json.dumps([*mutant[:3], lane, failed]) + "\n")
        if was_native:
            compiled(copy)
        if found and (failed := asked(copy, sorted(found), "", stop=False)):
            print(f"{failed} fails without a fault, too")
            wrong += 1
    print(dict(lanes))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
