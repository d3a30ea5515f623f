"""`python3 -m benchmarks.gpu_proof PART`: runs what needs a GPU, in three parts of under nine minutes that stand alone.

    checks   builds vdnn in place; tiny networks, training state and tests on the GPU; link, pinning, statistics, hooks
    steps    ResNet-50 and GPT-2: plain, checkpointed, and under three budgets; predicted beside measured; gradients
    zoo      steps whose shapes change, a compiled model, all networks, other ways of saving memory, what a step saves

Needs torch, cmake, ninja, pybind11 and a compiler, nvcc for device code, pytest and hypothesis for the tests; it says
what is missing, and needs no network. Builds in place and works in build/gpu-proof; installs nothing. Each step is a
process with a limit of its own, and a step that fails or hangs does not stop the others. Results go to $OUT, else to
benchmarks/results/, as they come: they are there whenever the program is stopped. The verdicts are printed last, in
less than 12,000 characters. Without a GPU it fails at once and writes no results. `--as-it-is` builds nothing and takes
the native core that is there. `--dry-run` goes through a part without a GPU: its figures mean nothing. Exit code 0:
every step passed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.on_a_gpu.judges import Judged
from benchmarks.on_a_gpu.proof_parts import PART_S, PARTS, ROOT, SPARE_S, Context, Step
from benchmarks.on_a_gpu.proof_results import Results
from benchmarks.on_a_gpu.step_process import Ended, last_lines, run_step
from benchmarks.on_a_gpu.verdicts import Outcome, render_verdicts

WORK = ROOT / "build" / "gpu-proof"
# cuBLAS sums in the same order each time only with a workspace of a fixed size.
ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
}
# A dry run shows that every step works, on machines of any speed: its limits are so many times those on a GPU.
DRY_PATIENCE = 20


class Part:
    """One run of a part. `outcomes` grows as steps end, and the verdicts are those of all steps at any time."""

    def __init__(self, name: str, steps: Sequence[Step], context: Context, results: Results) -> None:
        self._title = f"gpu-proof {name}" + (", a dry run: no figure means anything" if context.dry else "")
        self._steps = steps
        self._context = context
        self._results = results
        self._has_begun = False
        self.outcomes: list[Outcome] = []

    def run(self, part_s: float = PART_S - SPARE_S) -> None:
        """Run the steps in order, together in at most `part_s`. A signal ends the step that runs, and is raised."""
        began_s = time.monotonic()
        for index, step in enumerate(self._steps):
            used_s = time.monotonic() - began_s
            left_s = max(sum(one.limit_s for one in self._steps[:index]) - used_s, 0.0)
            # At most twice its limit, so that one that hangs leaves something to others.
            more_s = min(left_s, step.limit_s) if step.takes_rest else 0.0
            limit_s = min(step.limit_s + more_s, part_s - used_s)
            reason = self._why_not(step, limit_s)
            if reason:
                self._note(Outcome(step.name, None, 0.0, step.limit_s, reason))
                continue
            self._note(self._attempt(step, limit_s))
            self._archive()
            if step.must_find is not None and not self.outcomes[-1].facts.get(step.must_find):
                break

    def _why_not(self, step: Step, limit_s: float) -> str:
        missing = [name for name in step.needs if importlib.util.find_spec(name) is None]
        if missing:
            return f"needs {', '.join(missing)}, which this Python lacks"
        return "no time is left" if limit_s < 1 else ""

    def _attempt(self, step: Step, limit_s: float) -> Outcome:
        print(f"gpu-proof: {step.name}, at most {limit_s:.0f} s", flush=True)
        log = self._context.work / "logs" / f"{step.name.replace(',', '').replace(' ', '_')}.log"
        if self._has_begun:
            self._results.begin_step(step.name)
        command = step.command(self._context, limit_s)
        environment = {**ENVIRONMENT, **step.environment}
        began_s = time.monotonic()
        try:
            ended = run_step(command, limit_s, log, cwd=ROOT, environment=environment, looked=self._look)
        except KeyboardInterrupt:
            self._look()
            took_s = time.monotonic() - began_s
            stopped = replace(self._judged(step, Ended(0, took_s, log), limit_s), passed=False, said="was stopped")
            self._note(replace(stopped, log=last_lines(log)))
            raise
        return self._judged(step, ended, limit_s)

    def _look(self) -> None:
        if self._has_begun:
            self._results.follow()

    def _judged(self, step: Step, ended: Ended, limit_s: float) -> Outcome:
        try:
            judged = step.judge(ended.log, self._context.work)
        except Exception as error:  # an error of this program must not hide what other steps found
            judged = Judged((f"its output cannot be judged: {type(error).__name__}: {error}",))
        if step.must_find is not None and judged.facts.get(step.must_find) and not self._has_begun:
            self._has_begun = True
            self._results.begin()
            self._results.begin_step(step.name)
            self._results.follow()
        how = ended.said(limit_s)
        said = "; ".join([*([how] if how else []), *judged.problems])
        log = last_lines(ended.log) if said else ""
        return Outcome(step.name, not said, round(ended.took_s, 1), limit_s, said, judged.found, log, judged.facts)

    def _note(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        if self._has_begun:
            self._results.write_outcome({"part": self._title, **asdict(outcome)}, self.verdicts())

    def _archive(self) -> None:
        if self._has_begun:
            self._results.archive()

    def verdicts(self) -> str:
        """The verdicts on all steps. Those behind the last outcome did not run."""
        rest = [Outcome(step.name, None, 0.0, step.limit_s) for step in self._steps[len(self.outcomes) :]]
        return render_verdicts(self._title, [*self.outcomes, *rest])


def results_folder(*, dry: bool) -> Path:
    """Results of a dry run never lie where those of a GPU do."""
    told = os.environ.get("OUT")
    return Path(told) if told else WORK / "dry-results" if dry else ROOT / "benchmarks" / "results"


def _interrupt(number: int, frame: object) -> None:
    signal.signal(number, signal.SIG_IGN)  # a second one must not keep the verdicts from being printed
    raise KeyboardInterrupt


def run_part(name: str, *, dry: bool, as_it_is: bool = False, steps: Callable[[], Sequence[Step]] | None = None) -> int:
    work = WORK / (f"dry-{name}" if dry else name)
    shutil.rmtree(work, ignore_errors=True)
    (work / "run").mkdir(parents=True)
    results = Results(results_folder(dry=dry), f"{'dry' if dry else 'gpu'}_{name}", work)
    chosen = PARTS[name] if steps is None else steps()
    patience = DRY_PATIENCE if dry else 1
    patient = [replace(step, limit_s=patience * step.limit_s) for step in chosen]
    part = Part(name, patient, Context(work, dry, as_it_is), results)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _interrupt)
    code = 0
    with contextlib.suppress(BrokenPipeError):
        try:
            part.run(patience * (PART_S - SPARE_S))
        except KeyboardInterrupt:
            code = 130
        print(part.verdicts(), flush=True)
    return code or (0 if len(part.outcomes) and all(outcome.passed for outcome in part.outcomes) else 1)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python3 -m benchmarks.gpu_proof",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("part", choices=tuple(PARTS), metavar="PART", help=f"one of {', '.join(PARTS)}")
    parser.add_argument("--as-it-is", action="store_true", help="build nothing")
    parser.add_argument("--dry-run", action="store_true", help="without a GPU, with tiny sizes")
    options = parser.parse_args(arguments)
    return run_part(options.part, dry=options.dry_run, as_it_is=options.as_it_is)


if __name__ == "__main__":
    sys.exit(main())
