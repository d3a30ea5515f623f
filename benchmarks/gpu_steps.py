"""Part of `make gpu-proof`: ResNet-50 and a stack of GPT-2 XL's blocks under torch's and vdnn's ways of saving memory.

Of each way: peak of allocated bytes, the median time of a step, how long it stood still, and whether its gradients are
the plain step's. A way that fails says why and stops no other; one for which no time is left is not begun. Results are
written after every way, so that a run that is cut off has shown what it had. `--device cpu` runs everything at tiny
size as a virtual machine: it shows that this program works, and nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch

from benchmarks.gradient_check import GradientCheck
from benchmarks.models import Workload, resnet50
from benchmarks.models.gpt import GptShape, gpt
from benchmarks.models.resnet import resnet
from benchmarks.step_places import CudaPlace, StepPlace, VirtualPlace
from benchmarks.step_ways import PLAIN, STEP_WAYS, StepWay, Trial
from benchmarks.text_table import render_table
from vdnn.runtime.counters import Kept
from vdnn.runtime.session import Session
from vdnn.timeline import Track

TIMED_STEPS = 5
# No further step of a way is timed once its steps have taken this long.
PATIENCE_S = 8.0
LIMIT_S = 240.0


@dataclass(frozen=True, slots=True)
class StepModel:
    """A model to train, and whether under autocast to bfloat16. Of a small one, small storages are offloaded too."""

    name: str
    make: Callable[[], Workload]
    autocast: bool
    small: bool = False


MODELS = (
    StepModel("ResNet-50, batch 256", partial(resnet50, 256), autocast=False),
    StepModel("GPT, 12 blocks, 16 x 1024 tokens", partial(gpt, 16, 1024, GptShape(layers=12)), autocast=True),
)
SMALL_GPT = GptShape(vocabulary=64, tokens=64, layers=2, width=32, heads=2)
# They show that this program runs; nothing else can be read from them.
TINY_MODELS = (
    StepModel("ResNet, 2 blocks, batch 16", partial(resnet, 16, (1, 1), 64), autocast=False, small=True),
    StepModel("GPT, 2 small blocks, 8 x 64 tokens", partial(gpt, 8, 64, SMALL_GPT), autocast=True, small=True),
)


@dataclass(frozen=True, slots=True)
class StepResult:
    """Of one way. What a way does not have is None; `said` is why it failed, or ""."""

    model: str
    way: str
    said: str
    budget_bytes: int | None = None
    peak_bytes: int | None = None
    step_ns: int | None = None
    timed_steps: int = 0
    release_stall_ns: int | None = None
    reload_stall_ns: int | None = None
    to_host_bytes: int | None = None
    to_device_bytes: int | None = None
    # Saves that stayed because the host had no memory for them, or the driver refused the copy.
    not_taken: int | None = None
    identical: bool | None = None
    max_difference: float | None = None
    deterministic: bool | None = None


class Trainer:
    """Steps of one workload, the same again and again: nothing is updated."""

    def __init__(self, model: StepModel, place: StepPlace) -> None:
        torch.manual_seed(0)
        with place.making():
            self.workload = model.make()
        self._autocast = model.autocast
        self._place = place

    def backward(self) -> None:
        """A step whose gradients stay."""
        model, inputs, loss = self.workload
        with torch.autocast(self._place.device.type, torch.bfloat16, enabled=self._autocast):
            value = loss(model(*inputs))
        value.backward()  # type: ignore[no-untyped-call]

    def step_ns(self, session: Session | None) -> int:
        """Of a whole step, without what takes its gradients away again."""
        taken_ns = self._place.timed_ns(self.backward)
        self.workload.model.zero_grad(set_to_none=True)
        if session is not None:
            session.step()
        return taken_ns


def measure_way(way: StepWay, model: StepModel, trainer: Trainer, check: GradientCheck, trial: Trial) -> StepResult:
    place = trial.place
    with way.open(trial) as session:
        for _ in range(way.settling_steps):
            trainer.step_ns(session)
        place.reset_peak()
        times_ns = _timed_steps(trainer, session)
        peak_bytes = place.peak_bytes
        timeline = None if session is None else session.timeline
        compared = check.compare(trainer.backward)
        not_taken = None if session is None else _not_taken(session)
    return StepResult(
        model=model.name,
        way=way.name,
        said="",
        budget_bytes=trial.budget_bytes if way.has_budget else None,
        peak_bytes=peak_bytes,
        step_ns=round(statistics.median(times_ns)),
        timed_steps=len(times_ns),
        release_stall_ns=None if timeline is None else timeline.release_stall_ns,
        reload_stall_ns=None if timeline is None else timeline.reload_stall_ns,
        to_host_bytes=None if timeline is None else timeline.copied_bytes(Track.TO_HOST),
        to_device_bytes=None if timeline is None else timeline.copied_bytes(Track.TO_DEVICE),
        not_taken=not_taken,
        identical=compared.identical,
        max_difference=compared.max_difference,
        deterministic=check.is_strict,
    )


def _timed_steps(trainer: Trainer, session: Session | None) -> list[int]:
    began = time.monotonic()
    times_ns = [trainer.step_ns(session)]
    while len(times_ns) < TIMED_STEPS and time.monotonic() - began < PATIENCE_S:
        times_ns.append(trainer.step_ns(session))
    return times_ns


def _not_taken(session: Session) -> int:
    kept = session.counters.kept
    return kept[Kept.HOST_FULL] + kept[Kept.REFUSED]


def measure_model(
    model: StepModel, place: StepPlace, ways: Sequence[StepWay], until: float, wrote: Callable[[StepResult], None]
) -> None:
    """Tells of every way as soon as it is measured. `until` is of time.monotonic()."""
    trainer = Trainer(model, place)
    check = GradientCheck(trainer.workload.model)
    check.compare(trainer.backward)  # what all are compared with, plain too
    trial = Trial(place, trainer.workload, small=model.small)
    for way in ways:
        if time.monotonic() > until:
            wrote(StepResult(model.name, way.name, "not run: no time is left"))
            continue
        place.tidy()
        try:
            result = measure_way(way, model, trainer, check, trial)
        except Exception as error:  # a way that fails stops no other
            result = StepResult(model.name, way.name, _reason(error))
            trainer.workload.model.zero_grad(set_to_none=True)
        if way is PLAIN and result.peak_bytes is not None:
            trial = replace(trial, plain_peak_bytes=result.peak_bytes)
        wrote(result)


def _reason(error: Exception) -> str:
    first_line = next(iter(str(error).splitlines()), "").rstrip(".")
    return f"{type(error).__name__}: {first_line}"


def measure(
    place: StepPlace,
    models: Sequence[StepModel],
    *,
    ways: Sequence[StepWay] = STEP_WAYS,
    limit_s: float = LIMIT_S,
    wrote: Callable[[StepResult], None] = lambda result: None,
) -> list[StepResult]:
    """Each model has an equal part of what time is left when it begins."""
    until = time.monotonic() + limit_s
    results: list[StepResult] = []

    def note(result: StepResult) -> None:
        results.append(result)
        wrote(result)

    with place:
        for index, model in enumerate(models):
            now = time.monotonic()
            measure_model(model, place, ways, now + (until - now) / (len(models) - index), note)
            place.tidy()
    return results


def render(place: str, results: Sequence[StepResult]) -> str:
    header = ("way", "peak GiB", "of plain", "step ms", "of plain", "stall ms", "out GiB", "gradients")
    tables = []
    for model in dict.fromkeys(result.model for result in results):
        rows = [result for result in results if result.model == model]
        cells = [_cells(row, rows[0]) for row in rows]
        said = [f"{row.way}: {row.said}." for row in rows if row.said]
        said += [f"{row.way}: {row.not_taken} saves stayed for want of host memory." for row in rows if row.not_taken]
        if any(row.deterministic is False for row in rows):
            said.append("An operation has no deterministic form: gradients may differ by its doing.")
        tables.append(render_table(f"{model} on {place}", header, cells, said))
    return "\n\n".join(tables)


def _cells(row: StepResult, plain: StepResult) -> tuple[str, ...]:
    if row.said or row.peak_bytes is None or row.step_ns is None:
        return (row.way, *["-"] * 7)
    stall_ns = None if row.release_stall_ns is None else row.release_stall_ns + (row.reload_stall_ns or 0)
    return (
        row.way,
        f"{row.peak_bytes / 2**30:.2f}",
        f"{row.peak_bytes / plain.peak_bytes:.0%}" if plain.peak_bytes else "-",
        f"{row.step_ns / 1e6:.1f}",
        f"{row.step_ns / plain.step_ns:.2f} x" if plain.step_ns else "-",
        "-" if stall_ns is None else f"{stall_ns / 1e6:.1f}",
        "-" if row.to_host_bytes is None else f"{row.to_host_bytes / 2**30:.2f}",
        "identical" if row.identical else f"differ by {row.max_difference:.1e}",
    )


def write_json(path: Path, place: str, results: Sequence[StepResult]) -> None:
    """In one move: whoever reads it meanwhile reads a whole file."""
    content = {"format": 1, "device": place, "torch": torch.__version__, "steps": [asdict(one) for one in results]}
    fresh = path.with_suffix(".part")
    fresh.write_text(json.dumps(content, indent=2) + "\n")
    fresh.replace(path)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_steps", description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the results there, after every way")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, metavar="S", help=f"default {LIMIT_S:.0f}")
    options = parser.parse_args(arguments)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    place: StepPlace = CudaPlace() if options.device == "cuda" else VirtualPlace()
    results: list[StepResult] = []

    def wrote(result: StepResult) -> None:
        results.append(result)
        print(f"gpu_steps: {result.model}, {result.way}: {result.said or 'done'}", file=sys.stderr, flush=True)
        if options.json is not None:
            write_json(options.json, place.name, results)

    models = MODELS if options.device == "cuda" else TINY_MODELS
    measure(place, models, limit_s=options.limit_s, wrote=wrote)
    print(render(place.name, results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
