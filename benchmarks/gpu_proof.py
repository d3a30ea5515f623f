"""`make gpu-proof`: what only a GPU can show, in under ten minutes, on a machine that has one.

Needs torch, nvcc, cmake, ninja, pybind11, pytest and the plugins named in pyproject.toml, and no network.
Installs the tree into build/gpu-proof (never into the system), builds the native parts of the tests, runs
every test marked `gpu` with skips turned into failures, measures the link, and trains ResNet-50 and a GPT
under every way of saving memory (benchmarks/gpu_steps.py). Every step runs whatever became of the others,
except that without a GPU nothing is worth running. One summary is printed and written to
$OUT/gpu_proof.json, else to benchmarks/results/gpu_proof.json. Exit code 0: every step passed.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.step_verdict import faults_of_steps, steps_headline

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "gpu-proof"
SITE = WORK / "site"
# All steps together; the promise is ten minutes, and the last one must still be able to write.
BUDGET_S = 570.0
# Where tests marked gpu are. Others are not even collected: they may need packages that this machine has not.
CUDA_TESTS = ("tests/codec", "tests/device", "tests/memory", "tests/transfer", "tests/runtime/test_on_cuda.py")
# cuBLAS repeats its sums in the same order only with a workspace of a fixed size.
CUBLAS_WORKSPACE = ":4096:8"
# What gpu_steps needs to write and to end after its last way.
LAST_WAY_S = 40.0


@dataclass(frozen=True)
class Outcome:
    """What became of one step. `facts` is what it measured or counted."""

    step: str
    passed: bool
    took_s: float
    said: str
    facts: dict[str, Any]


class StepFailed(Exception):
    """A step's own verdict; the text says what was expected and what came. `facts` is what was found all the same."""

    def __init__(self, said: str, facts: dict[str, Any] | None = None) -> None:
        super().__init__(said)
        self.facts = facts or {}


@dataclass(frozen=True)
class Step:
    """One thing to prove: `prove` gets its limit in seconds and returns its facts, or raises."""

    name: str
    limit_s: float
    prove: Callable[[float], dict[str, Any]]


def run(command: Sequence[str], limit_s: float, *, cwd: Path = ROOT, **environment: str) -> str:
    """Runs a command to its end and returns its stdout; StepFailed with the tail of its output if it
    fails.
    """
    try:
        done = subprocess.run(
            command,
            cwd=cwd,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=limit_s,
        )
    except subprocess.TimeoutExpired as expired:
        raise StepFailed(f"{' '.join(command[:4])} ran past its {limit_s:.0f} s") from expired
    if done.returncode != 0:
        raise StepFailed(f"exit code {done.returncode}\n{tail(done.stdout + done.stderr)}")
    return done.stdout


def tail(text: str, lines: int = 40) -> str:
    return "\n".join(text.rstrip().splitlines()[-lines:])


def see_gpu(_: float) -> dict[str, Any]:
    """Asks the driver itself, before anything of ours is built."""
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
    """The tree as a user would install it without a network, into a directory of our own."""
    shutil.rmtree(SITE, ignore_errors=True)
    options = ["--no-build-isolation", "--no-deps", "--no-index", "--disable-pip-version-check", "--quiet"]
    run([sys.executable, "-m", "pip", "install", *options, "--target", str(SITE), str(ROOT)], limit_s)
    core = sorted(path.name for path in (SITE / "vdnn").glob("_C*.so"))
    if not core:
        raise StepFailed(f"expected vdnn/_C*.so in {SITE}, found none")
    return {"native_core": core[0]}


def build_testing_parts(limit_s: float) -> dict[str, Any]:
    run([sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"], limit_s, VDNN_BUILD_TESTING="ON")
    return {"testing_parts": sorted(path.name for path in (ROOT / "build" / "testing").iterdir())}


def run_cuda_tests(limit_s: float) -> dict[str, Any]:
    """Every test marked gpu. A skip is a failure here: this machine is the one that may not skip."""
    results = WORK / "tests.xml"
    results.unlink(missing_ok=True)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-m",
        "gpu",
        "-q",
        *CUDA_TESTS,
        "--benchmark-disable",
        f"--junitxml={results}",
    ]
    failure: StepFailed | None = None
    try:
        run(command, limit_s, VDNN_REQUIRE_CUDA="1", CUBLAS_WORKSPACE_CONFIG=CUBLAS_WORKSPACE)
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
    """How many tests ran, failed and were skipped, from pytest's junit file."""
    suites = list(ElementTree.fromstring(junit_xml).iter("testsuite"))
    counted = {name: sum(int(suite.get(name, "0")) for suite in suites) for name in ("tests", "skipped")}
    failed = sum(int(suite.get(name, "0")) for suite in suites for name in ("failures", "errors"))
    return {"run": counted["tests"], "failed": failed, "skipped": counted["skipped"]}


def probe_link(limit_s: float) -> dict[str, Any]:
    """The installed doctor's report; every GPU must have a measured link, every kernel its device code."""
    # From WORK, so that the installed package is imported and not the checkout's.
    output = run([sys.executable, "-m", "vdnn", "doctor", "--json"], limit_s, cwd=WORK, PYTHONPATH=str(SITE))
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


def measure_steps(limit_s: float) -> dict[str, Any]:
    """Training steps under torch's and vdnn's ways. They are in the results whatever the verdict is."""
    results = WORK / "gpu_steps.json"
    results.unlink(missing_ok=True)
    own_limit_s = max(limit_s - LAST_WAY_S, 1.0)
    command = [sys.executable, "-m", "benchmarks.gpu_steps", "--json", str(results), "--limit-s", f"{own_limit_s:.0f}"]
    failure: StepFailed | None = None
    try:
        print(run(command, limit_s, CUBLAS_WORKSPACE_CONFIG=CUBLAS_WORKSPACE))
    except StepFailed as failed:
        failure = failed
    if not results.is_file():
        raise failure or StepFailed("gpu_steps wrote no results")
    facts: dict[str, Any] = json.loads(results.read_text())
    problems = faults_of_steps(facts["steps"]) + ([] if failure is None else [str(failure)])
    if problems:
        raise StepFailed("\n".join(problems), facts)
    return facts


STEPS = (
    Step("gpu", 20, see_gpu),
    Step("install", 120, install),
    Step("testing parts", 120, build_testing_parts),
    Step("cuda tests", 200, run_cuda_tests),
    Step("link", 60, probe_link),
    Step("gpu steps", 300, measure_steps),
)


def prove(steps: Sequence[Step], *, budget_s: float = BUDGET_S) -> list[Outcome]:
    """Runs the steps in order. One that fails stops no other, but without the first, the GPU, there is
    nothing to prove, and the rest is reported as not run.
    """
    began = time.monotonic()
    outcomes: list[Outcome] = []
    for step in steps:
        if outcomes and not outcomes[0].passed:
            outcomes.append(Outcome(step.name, False, 0.0, "not run: there is no GPU", {}))
            continue
        print(f"gpu-proof: {step.name} ...", flush=True)
        left_s = budget_s - (time.monotonic() - began)
        outcomes.append(attempt(step, min(step.limit_s, max(left_s, 1.0))))
    return outcomes


def attempt(step: Step, limit_s: float) -> Outcome:
    began = time.monotonic()
    facts: dict[str, Any] = {}
    said = ""
    try:
        facts = step.prove(limit_s)
    except StepFailed as failed:
        said, facts = str(failed), failed.facts
    except Exception as error:
        # A fault of this program in one step must not hide what the others found.
        said = f"{type(error).__name__}: {error}"
    return Outcome(step.name, not said, round(time.monotonic() - began, 2), said, facts)


def summary(outcomes: Sequence[Outcome]) -> str:
    lines = ["", "gpu-proof"]
    for outcome in outcomes:
        verdict = "passed" if outcome.passed else "FAILED"
        lines.append(f"  {outcome.step:14} {verdict}  {outcome.took_s:7.2f} s  {headline(outcome)}")
        lines += [f"      {line}" for line in outcome.said.splitlines()[1:]]
    passed = sum(outcome.passed for outcome in outcomes)
    return "\n".join([*lines, f"{passed} passed, {len(outcomes) - passed} failed"])


def headline(outcome: Outcome) -> str:
    if outcome.said:
        return outcome.said.splitlines()[0]
    if outcome.step == "link":
        return "; ".join(link_headline(gpu) for gpu in outcome.facts["gpus"])
    if outcome.step == "gpu steps":
        return steps_headline(outcome.facts["steps"])
    return ", ".join(f"{name} {value}" for name, value in outcome.facts.items())


def link_headline(gpu: dict[str, Any]) -> str:
    link = gpu["link"]
    ways = {"to host": "to_host", "to device": "to_device", "both": "both_ways"}
    rates = ", ".join(f"{name} {link[f'{field}_bytes_per_s'] / 1e9:.1f}" for name, field in ways.items())
    return f"{gpu['name']}: GB/s {rates}"


def write_results(outcomes: Sequence[Outcome]) -> Path:
    directory = Path(os.environ.get("OUT") or ROOT / "benchmarks" / "results")
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "gpu_proof.json"
    steps = [asdict(outcome) for outcome in outcomes]
    path.write_text(json.dumps({"format": 1, "steps": steps}, indent=2) + "\n")
    return path


def main() -> int:
    WORK.mkdir(parents=True, exist_ok=True)
    outcomes = prove(STEPS)
    path = write_results(outcomes)
    print(f"results are in {path}")
    print(summary(outcomes))
    return 0 if all(outcome.passed for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
