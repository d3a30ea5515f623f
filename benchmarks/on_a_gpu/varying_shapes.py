"""Part of gpu-proof: trains cases of benchmarks.shapes on the GPU, plain and under a budget, step by step.

The budget is 60 % of the largest requested peak of a plain step. Both trainings begin from the same seed and take the
same steps with their optimizers, under deterministic algorithms: afterwards their parameters must be equal, bit for
bit. Each step's time and peak are written as a case ends. Where steps exceed the budget, the session's causes are said,
and the case is trained again without recipes: if it then keeps the budget, trials and recomputes took the rest. Each
such step is named, with its size, beside plain's peak at it and what plain's peaks at the next smaller and larger sizes
give for it: a workspace that only this size takes shows there.
`--device virtual` trains in virtual time, without data, to try the program.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import logging
import os
import sys
import time
import traceback
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

import vdnn
from benchmarks.harness.determinism import deterministic
from benchmarks.harness.measure import SEED, digest_of, first_line
from benchmarks.shapes.cases import CASES, Case, Subject
from benchmarks.shapes.figures import LEARNING_STEPS, Executed

NAMES = ("decoder", "padded encoder", "multi-scale images", "four micro-batches", "smaller last batch")
BUDGET_SHARE = 0.6
HARDWARE = "rtx-4090"


class Clock(ABC):
    """The device that a case is trained on: enter it, then time steps."""

    device: Any

    @abstractmethod
    def entered(self) -> AbstractContextManager[object]: ...

    @abstractmethod
    def timed(self, subject: Subject, size: Any) -> Executed: ...

    @abstractmethod
    def digest(self, subject: Subject) -> str | None:
        """A digest of the parameters, or None if they have no data."""


class GpuClock(Clock):
    """The current GPU: events around each step, requested bytes by torch's statistics. `cuda` is torch.cuda, or a
    stand-in in a test, and `place` the device of the tensors."""

    device = "cuda"

    def __init__(self, cuda: Any = torch.cuda, place: str = "cuda") -> None:
        self._cuda = cuda
        self._place = place

    @contextlib.contextmanager
    def entered(self) -> Any:
        with deterministic(strict=False), torch.device(self._place):
            yield
        gc.collect()
        self._cuda.empty_cache()

    def timed(self, subject: Subject, size: Any) -> Executed:
        cuda = self._cuda
        begin, end = (cuda.Event(enable_timing=True) for _ in range(2))
        cuda.reset_peak_memory_stats()
        begin.record()
        subject.train(size)
        end.record()
        cuda.synchronize()
        peak_bytes = cuda.memory_stats()["requested_bytes.all.peak"]
        return Executed(round(begin.elapsed_time(end) * 1e6), int(peak_bytes))

    def digest(self, subject: Subject) -> str | None:
        groups = [group for optimizer in subject.optimizers for group in optimizer.param_groups]
        return digest_of({str(index): one for index, one in enumerate(p for group in groups for p in group["params"])})


class VirtualClock(Clock):
    """A virtual machine without data."""

    def __init__(self) -> None:
        self.device = vdnn.VirtualMachine(HARDWARE)

    def entered(self) -> AbstractContextManager[object]:
        return self.device  # type: ignore[no-any-return]

    def timed(self, subject: Subject, size: Any) -> Executed:
        self.device.reset_peak()
        begin_ns = self.device.now_ns
        subject.train(size)
        return Executed(self.device.now_ns - begin_ns, self.device.peak_bytes)

    def digest(self, subject: Subject) -> str | None:
        return None


@dataclass(frozen=True, slots=True)
class Varied:
    """A case: each step plain and under the budget. `same` is None if parameters have no data. `causes`: of the steps
    over the budget, as the session says them; `without_recipes`: the same steps, where some were over it."""

    case: str
    said: str
    budget_bytes: int = 0
    plain: tuple[Executed, ...] = ()
    ours: tuple[Executed, ...] = ()
    same: bool | None = None
    causes: str = ""
    without_recipes: tuple[Executed, ...] = ()
    sizes: tuple[tuple[Any, ...], ...] = ()  # of the steps

    @property
    def steps_over(self) -> list[str]:
        """A line for each step over the budget, with what tells the causes apart."""
        lines = []
        for index, (size, plain, ours) in enumerate(zip(self.sizes, self.plain, self.ours, strict=False)):
            if ours.peak_bytes <= self.budget_bytes:
                continue
            line = f"  step {index + 1}, size {size}: {ours.peak_bytes / self.budget_bytes:.3f} of the budget"
            if index < len(self.without_recipes):
                line += f", without recipes {self.without_recipes[index].peak_bytes / self.budget_bytes:.3f}"
            lines.append(f"{line}; plain {plain.peak_bytes / 2**20:.0f} MiB{self._plain_by_neighbours(size)}")
        return lines

    def _plain_by_neighbours(self, size: tuple[Any, ...]) -> str:
        """Interpolates plain's peak at this size from the next smaller and the next larger one, if there are both."""
        alike = {
            one[-1]: step.peak_bytes for one, step in zip(self.sizes, self.plain, strict=False) if one[:-1] == size[:-1]
        }
        last, numbers = size[-1], sorted(one for one in alike if isinstance(one, int))
        if last not in numbers[1:-1]:
            return ""
        low, high = numbers[numbers.index(last) - 1], numbers[numbers.index(last) + 1]
        between = alike[low] + (alike[high] - alike[low]) * (last - low) / (high - low)
        return f", and by sizes {low} and {high} {between / 2**20:.0f}"

    @property
    def over_budget(self) -> int:
        return self._over(self.ours)

    def _over(self, steps: tuple[Executed, ...]) -> int:
        return sum(step.peak_bytes > self.budget_bytes for step in steps)

    @property
    def over_plain(self) -> float:
        """The time of the steps behind the first, over that of plain's."""
        plain_ns, ours_ns = (sum(step.step_ns for step in steps[LEARNING_STEPS:]) for steps in (self.plain, self.ours))
        return ours_ns / plain_ns if plain_ns else 0.0

    @property
    def is_good(self) -> bool:
        return not self.said and self.same is not False and not self.over_budget

    def __str__(self) -> str:
        if self.said:
            return f"{self.case}: {self.said}"
        bits = {True: "parameters as plain", False: "parameters DIFFER from plain", None: "no data to compare"}[
            self.same
        ]
        worst = max((step.peak_bytes / self.budget_bytes for step in self.ours), default=0.0)
        largest = max(step.peak_bytes for step in self.plain)
        over = f"{self.over_budget} of {len(self.ours)} steps over the budget, highest {worst:.3f} of it"
        peaks = f"budget {self.budget_bytes / 2**30:.2f} of {largest / 2**30:.2f} GiB"
        if self.over_budget:
            over += f" ({self.causes}; without recipes {self._over(self.without_recipes)})"
        return f"{self.case}: {bits}; {peaks}; {over}; {self.over_plain:.3f} x plain's time"


class Trained(NamedTuple):
    """The steps of one training, a digest of its parameters, and why steps were over the budget."""

    steps: tuple[Executed, ...]
    digest: str | None
    causes: str


def trained(case: Case, clock: Clock, budget_bytes: int | None, steps: int, *, recompute: bool = True) -> Trained:
    """All steps of the case from the same seed, plain if there is no budget."""
    with clock.entered():
        torch.manual_seed(SEED)
        subject = case.make()
        subject.make_states()
        session = None
        if budget_bytes is not None:
            session = vdnn.offload(budget=budget_bytes, device=clock.device, recompute=recompute)
        try:
            with session or contextlib.nullcontext():
                executed = tuple(clock.timed(subject, size) for size in case.sizes[:steps])
            said = "" if session is None else session.report()
        finally:
            if session is not None:
                session.close()
        causes = next((line.strip() for line in said.splitlines() if line.startswith("  budget")), "")
        return Trained(executed, clock.digest(subject), causes)


def measure(case: Case, device: str, steps: int) -> Varied:
    def clock() -> Clock:
        return GpuClock() if device == "cuda" else VirtualClock()

    try:
        plain = trained(case, clock(), None, steps)
        budget_bytes = int(BUDGET_SHARE * max(step.peak_bytes for step in plain.steps))
        ours = trained(case, clock(), budget_bytes, steps)
        same = None if ours.digest is None else ours.digest == plain.digest
        sizes = tuple(case.sizes[:steps])
        found = Varied(case.name, "", budget_bytes, plain.steps, ours.steps, same, ours.causes, sizes=sizes)
        if found.over_budget:
            again = trained(case, clock(), budget_bytes, steps, recompute=False)
            found = replace(found, without_recipes=again.steps)
    except Exception as error:  # a case that fails must not hide the others
        traceback.print_exc()
        return Varied(case.name, f"{type(error).__name__}: {first_line(error)}")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.on_a_gpu.varying_shapes", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "virtual"), default="cuda")
    parser.add_argument("--cases", default=",".join(NAMES), metavar="NAMES", help="separated by commas")
    parser.add_argument("--steps", type=int, default=30, metavar="N", help="at most, of each case")
    parser.add_argument("--limit-s", type=float, default=float("inf"), metavar="S")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the cases there, line by line")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("varying_shapes: torch sees no GPU here: --device virtual tries it without one.", file=sys.stderr)
        return 2
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # What sessions say of their budgets is in the figures.
    logging.getLogger("vdnn").setLevel(logging.ERROR)
    warnings.simplefilter("ignore", vdnn.VdnnWarning)
    began_s = time.monotonic()
    cases = {case.name: case for case in CASES}
    failures = 0
    for name in options.cases.split(","):
        if time.monotonic() - began_s > options.limit_s:
            print(f"the time is over: {name} and those behind it did not run")
            break
        found = measure(cases[name], options.device, options.steps)
        failures += not found.is_good
        print("\n".join([str(found), *found.steps_over]), flush=True)
        if options.json is not None:
            with options.json.open("a") as lines:
                lines.write(json.dumps(asdict(found)) + "\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
