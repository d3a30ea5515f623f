"""`make gpu-proof`: runs everything that needs a GPU, in under nine minutes.

Needs torch, nvcc, cmake, ninja, pybind11, pytest and the plugins named in pyproject.toml, and no network. It also uses
torchvision, timm, transformers and peers if they are installed. Builds into build/gpu-proof and in place, never into
the system. The parts are build, tests, link, races, cnn, llm and predict; `PART=cnn,llm` runs only these two. Every
step runs even if others failed, but without a GPU none does. Results go line by line to $OUT, else to
benchmarks/results/: gpu_proof.jsonl, and the run with its cells as gpu_run.tar.gz. Exit code 0: every step passed.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tarfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.on_a_gpu.gpu_parts import PARTS, ROOT, RUN, STEPS, Step, StepFailed, see_gpu

# For all steps together. The limit is nine minutes, and the last step needs time to write.
BUDGET_S = 520.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one step. `facts` is what it measured or counted."""

    step: str
    passed: bool
    took_s: float
    said: str
    facts: dict[str, Any]


def steps_of(parts: Sequence[str]) -> list[Step]:
    """The steps of these parts. The check for a GPU always comes first."""
    unknown = [part for part in parts if part not in PARTS]
    if unknown or not parts:
        raise ValueError(f"PART: expected some of {','.join(PARTS)}, got {','.join(unknown) or 'nothing'}.")
    return [step for step in STEPS if step.part in parts or step.prove is see_gpu]


def prove(
    steps: Sequence[Step], *, budget_s: float = BUDGET_S, wrote: Callable[[Outcome], None] = lambda outcome: None
) -> list[Outcome]:
    """Run the steps in order. Each leaves later steps the least time that they need. A failed step does not stop the
    others, but if the first step finds no GPU, the rest is reported as not run.
    """
    began = time.monotonic()
    outcomes: list[Outcome] = []
    for index, step in enumerate(steps):
        if outcomes and not outcomes[0].passed:
            outcome = Outcome(step.name, False, 0.0, "not run: there is no GPU", {})
        else:
            print(f"gpu-proof: {step.name} ...", flush=True)
            left_s = budget_s - (time.monotonic() - began) - sum(later.least_s for later in steps[index + 1 :])
            outcome = attempt(step, min(step.limit_s, max(left_s, 1.0)))
        outcomes.append(outcome)
        wrote(outcome)
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
        # An error of this program in one step must not hide the results of the others.
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
    if outcome.step == "doctor":
        return "; ".join(link_headline(gpu) for gpu in outcome.facts["gpus"])
    counted = {name: len(value) if isinstance(value, list) else value for name, value in outcome.facts.items()}
    return ", ".join(f"{name} {value}" for name, value in counted.items() if not isinstance(value, dict))


def link_headline(gpu: dict[str, Any]) -> str:
    link = gpu["link"]
    ways = {"to host": "to_host", "to device": "to_device", "both": "both_ways"}
    rates = ", ".join(f"{name} {link[f'{field}_bytes_per_s'] / 1e9:.1f}" for name, field in ways.items())
    return f"{gpu['name']}: GB/s {rates}"


class Results:
    """Writes results as soon as they exist: a line for each step, and the run with its cells so far."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.path = folder / "gpu_proof.jsonl"
        self._archive = folder / "gpu_run.tar.gz"
        self._is_begun = False

    def write(self, outcome: Outcome) -> None:
        """Write one outcome. Writes nothing until the check for a GPU has passed, so that the results of another
        machine are not overwritten."""
        if not self._is_begun and not outcome.passed:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        with self.path.open("a" if self._is_begun else "w") as lines:
            self._is_begun = True
            lines.write(json.dumps({"format": 2, **asdict(outcome)}) + "\n")
        if outcome.passed or outcome.facts:
            self._archive_run()

    def _archive_run(self) -> None:
        """Archive the run and rename the archive, so that a reader always finds a complete one."""
        if any(RUN.rglob("*.json*")):
            fresh = self._archive.with_suffix(".part")
            with tarfile.open(fresh, "w:gz") as archive:
                archive.add(RUN, "gpu_run")
            fresh.replace(self._archive)


def main() -> int:
    try:
        steps = steps_of([part.strip() for part in os.environ.get("PART", ",".join(PARTS)).split(",")])
    except ValueError as error:
        print(f"gpu-proof: {error}", file=sys.stderr)
        return 2
    if any(step.part == "build" and step.prove is not see_gpu for step in steps):
        shutil.rmtree(RUN, ignore_errors=True)  # the run of an earlier build
    RUN.mkdir(parents=True, exist_ok=True)
    results = Results(Path(os.environ.get("OUT") or ROOT / "benchmarks" / "results"))
    outcomes = prove(steps, wrote=results.write)
    if results.path.is_file() and outcomes[0].passed:
        print(f"results are in {results.path.parent}, the run is in {RUN}")
    print(summary(outcomes))
    return 0 if all(outcome.passed for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
