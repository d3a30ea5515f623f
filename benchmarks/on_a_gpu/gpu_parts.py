"""The steps of `make gpu-proof`. Each is a function of its limit in seconds, which returns its facts or raises.

Steps run programs and judge what those write. No step imports torch or the native core, so that a broken installation
differs from a broken step. Measurements go into one run (docs/benchmarks.md), line by line.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.claims import is_ours, is_refused
from vdnn.report.cell import FAILED, OK, TIMED_OUT, Cell
from vdnn.report.run_folder import CELLS_FILE, read_cells
from vdnn.step.json_lines import read_json_lines

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / "build" / "gpu-proof"
SITE = WORK / "site"
RUN = WORK / "run"
# Folders with tests marked gpu. Others are not collected, because they may need packages that are not installed.
CUDA_TESTS = (
    "tests/codec",
    "tests/device",
    "tests/memory",
    "tests/transfer",
    "tests/runtime/session/test_on_cuda.py",
    "tests/benchmarks/test_demo_on_cuda.py",
)
RACES = ("tests/runtime/session/test_delays_on_cuda.py",)
SCHEDULES = "6"
# cuBLAS sums in the same order each time only with a workspace of a fixed size.
CUBLAS_WORKSPACE = ":4096:8"
# The time that a sweep needs after its last cell.
LAST_CELL_S = 15.0
CNN = ("resnet50", "vgg16")
LLM = ("gpt2", "llama_8b_4k")
BUDGETS = ("peers", "90%", "75%", "60%", "45%", "min")


class StepFailed(Exception):
    """A step has failed. The text says what was expected and what came; `facts` is what the step still found."""

    def __init__(self, said: str, facts: dict[str, Any] | None = None) -> None:
        super().__init__(said)
        self.facts = facts or {}


@dataclass(frozen=True, slots=True)
class Step:
    """One step. `prove` gets its limit in seconds and returns its facts, or raises. The steps before it leave it at
    least `least_s`."""

    name: str
    part: str
    limit_s: float
    least_s: float
    prove: Callable[[float], dict[str, Any]]


def run(command: Sequence[str], limit_s: float, *, cwd: Path = ROOT, **environment: str) -> str:
    """Run a command and return its stdout. Raises StepFailed with the tail of its output if it fails."""
    try:
        done = subprocess.run(
            command, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True, timeout=limit_s
        )
    except subprocess.TimeoutExpired as expired:
        raise StepFailed(f"{' '.join(command[:4])} ran past its {limit_s:.0f} s") from expired
    if done.returncode != 0:
        raise StepFailed(f"exit code {done.returncode}\n{tail(done.stdout + done.stderr)}")
    return done.stdout


def tail(text: str, lines: int = 40) -> str:
    return "\n".join(text.rstrip().splitlines()[-lines:])


# build


def see_gpu(_: float) -> dict[str, Any]:
    """Ask the driver for GPUs, before anything is built."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise StepFailed(f"no GPU: the CUDA driver library cannot be loaded ({error})") from error
    status, count = driver.cuInit(0), ctypes.c_int(0)
    if status != 0:
        raise StepFailed(f"no GPU: cuInit returned {status}")
    driver.cuDeviceGetCount(ctypes.byref(count))
    if count.value == 0:
        raise StepFailed("no GPU: the driver sees none")
    return {"device_count": count.value}


def install(limit_s: float) -> dict[str, Any]:
    """Install the tree as a user would without a network, into a directory of our own."""
    shutil.rmtree(SITE, ignore_errors=True)
    options = ["--no-build-isolation", "--no-deps", "--no-index", "--disable-pip-version-check", "--quiet"]
    run([sys.executable, "-m", "pip", "install", *options, "--target", str(SITE), str(ROOT)], limit_s)
    core = sorted(path.name for path in (SITE / "vdnn").glob("_C*.so"))
    if not core:
        raise StepFailed(f"expected vdnn/_C*.so in {SITE}, found none")
    return {"native_core": core[0]}


def build_in_place(limit_s: float) -> dict[str, Any]:
    """Build in place, with the native parts of the tests. All other parts use this build."""
    run([sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"], limit_s, VDNN_BUILD_TESTING="ON")
    return {"testing_parts": sorted(path.name for path in (ROOT / "build" / "testing").iterdir())}


# tests, races


def run_cuda_tests(limit_s: float) -> dict[str, Any]:
    return _gpu_tests(CUDA_TESTS, limit_s, WORK / "tests.xml")


def run_races(limit_s: float) -> dict[str, Any]:
    return _gpu_tests(RACES, limit_s, WORK / "races.xml", VDNN_DELAY_SEEDS=SCHEDULES)


def _gpu_tests(places: Sequence[str], limit_s: float, results: Path, **environment: str) -> dict[str, Any]:
    """Run every test marked gpu. A skip is a failure, because a machine with a GPU may not skip."""
    results.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", *places, "--benchmark-disable"]
    failure: StepFailed | None = None
    try:
        run(
            [*command, f"--junitxml={results}"],
            limit_s,
            cwd=ROOT,
            VDNN_REQUIRE_CUDA="1",
            CUBLAS_WORKSPACE_CONFIG=CUBLAS_WORKSPACE,
            **environment,
        )
    except StepFailed as failed:
        failure = failed
    if not results.is_file():
        raise failure or StepFailed("pytest wrote no results")
    counts = count_tests(results.read_text())
    if failure is not None:
        raise StepFailed(f"{counts}: {failure}")
    if counts["run"] == 0:
        raise StepFailed("expected tests marked gpu, found none")
    if counts["skipped"]:
        raise StepFailed(f"expected no skips on a machine with a GPU: {counts}")
    return {**counts}


def count_tests(junit_xml: str) -> dict[str, int]:
    """The counts of tests that ran, failed and were skipped, from pytest's junit file."""
    suites = list(ElementTree.fromstring(junit_xml).iter("testsuite"))
    counted = {name: sum(int(suite.get(name, "0")) for suite in suites) for name in ("tests", "skipped")}
    failed = sum(int(suite.get(name, "0")) for suite in suites for name in ("failures", "errors"))
    return {"run": counted["tests"], "failed": failed, "skipped": counted["skipped"]}


# link


def examine(limit_s: float) -> dict[str, Any]:
    """The doctor's report. Every GPU must have a measured link, and every kernel its device code."""
    # Use the installed package if it exists, and run in WORK, so that the checkout is not imported.
    installed = (SITE / "vdnn").is_dir()
    environment = {"PYTHONPATH": str(SITE)} if installed else {}
    output = run(
        [sys.executable, "-m", "vdnn", "doctor", "--json"], limit_s, cwd=WORK if installed else ROOT, **environment
    )
    return judge_doctor(json.loads(output))


def judge_doctor(report: dict[str, Any]) -> dict[str, Any]:
    gpus = report["gpus"]
    problems = [f"GPU {gpu['ordinal']}: {gpu['problem']}" for gpu in gpus if gpu["link"] is None]
    problems += [f"kernel {codec['kernel']}: {codec['reason']}" for codec in report["codecs"] if not codec["available"]]
    if not gpus:
        problems.append(f"the doctor sees no GPU: {report['driver']['problem']}")
    if problems:
        raise StepFailed("; ".join(problems))
    return {"gpus": gpus, "driver": report["driver"], "host": report["host"], "torch": report["torch"]}


def measure_link(limit_s: float) -> dict[str, Any]:
    """The rates of the link by block size, pinned and pageable."""
    path = RUN / "link.jsonl"
    print(_program("on_a_gpu.link_sizes", limit_s, "--json", str(path)))
    return {"rows": read_json_lines(path).values}


def measure_hooks(limit_s: float) -> dict[str, Any]:
    path = WORK / "hook_cost.json"
    print(_program("core.hook_cost", limit_s, "--json", str(path)))
    facts: dict[str, Any] = json.loads(path.read_text())
    return facts


# cnn, llm


def train_cnns(limit_s: float) -> dict[str, Any]:
    return _sweep(CNN, limit_s)


def train_language_models(limit_s: float) -> dict[str, Any]:
    return _sweep(LLM, limit_s)


def _sweep(workloads: Sequence[str], limit_s: float) -> dict[str, Any]:
    """Sweep over every peer, and vdnn under every budget. The cells are kept whatever the verdict is."""
    own_limit_s = max(limit_s - LAST_CELL_S, 1.0)
    options = ["--place", "cuda", "--workloads", ",".join(workloads), "--budgets", ",".join(BUDGETS)]
    failure: StepFailed | None = None
    try:
        print(_program("sweep", limit_s, *options, "--out", str(RUN), "--limit-s", f"{own_limit_s:.0f}"))
    except StepFailed as failed:
        failure = failed
    cells = [cell for cell in read_cells(RUN / CELLS_FILE) if cell.workload in workloads]
    if not cells:
        raise failure or StepFailed("the sweep wrote no cells")
    return _judged(cells, failure)


def _judged(cells: Sequence[Cell], failure: StepFailed | None) -> dict[str, Any]:
    """Raise StepFailed if a cell of vdnn fails or changes a gradient. Failures of other peers are allowed."""
    facts = {"cells": len(cells), "ok": sum(cell.status == OK for cell in cells)}
    problems = [] if failure is None else [str(failure)]
    for cell in cells:
        if not is_ours(cell):
            continue
        title = f"{cell.workload}, {cell.peer}, {cell.budget}"
        if is_refused(cell):
            continue
        if cell.status in (FAILED, TIMED_OUT):
            problems.append(f"{title}: {cell.status}: {cell.said}")
        elif cell.identical is False:
            problems.append(f"{title}: gradients differ from the plain step's")
    if problems:
        raise StepFailed("\n".join(problems), facts)
    return facts


# predict


def compare_saved(limit_s: float) -> dict[str, Any]:
    """Compare what vdnn.plan predicts without a GPU with what this GPU saves."""
    path = RUN / "saved.jsonl"
    print(_program("on_a_gpu.saved_on_cuda", limit_s, "--json", str(path)))
    return {"rows": read_json_lines(path).values}


def judge_claims(limit_s: float) -> dict[str, Any]:
    """Check the claims against all cells of the run."""
    if not (RUN / CELLS_FILE).is_file():
        raise StepFailed("there are no cells: run the parts cnn and llm")
    said = _program("claims", limit_s, str(RUN), may_fail=True)
    print(said)
    claims = said.splitlines()
    broken = [line for line in claims if line.startswith("BROKEN")]
    if broken or not claims:
        raise StepFailed("\n".join(broken) or "no claims were printed", {"claims": claims})
    return {"claims": claims}


def _program(name: str, limit_s: float, *options: str, may_fail: bool = False) -> str:
    """Run a program of benchmarks. With `may_fail`, exit code 1 is a verdict of the program and not a failure."""
    command = [sys.executable, "-m", f"benchmarks.{name}", *options]
    try:
        return run(command, limit_s, CUBLAS_WORKSPACE_CONFIG=CUBLAS_WORKSPACE)
    except StepFailed as failed:
        first, _, rest = str(failed).partition("\n")
        if may_fail and first == "exit code 1":
            return rest
        raise


STEPS = (
    Step("gpu", "build", 20, 1, see_gpu),
    Step("install", "build", 90, 20, install),
    Step("in place", "build", 90, 20, build_in_place),
    Step("cuda tests", "tests", 120, 40, run_cuda_tests),
    Step("doctor", "link", 20, 5, examine),
    Step("link", "link", 30, 10, measure_link),
    Step("hooks", "link", 30, 10, measure_hooks),
    Step("races", "races", 60, 20, run_races),
    Step("cnn", "cnn", 150, 60, train_cnns),
    Step("llm", "llm", 150, 60, train_language_models),
    Step("saved", "predict", 60, 30, compare_saved),
    Step("claims", "predict", 20, 10, judge_claims),
)
PARTS = tuple(dict.fromkeys(step.part for step in STEPS))
