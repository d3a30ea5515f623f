"""Part of gpu-proof: trains one small model with each part of the training state on the host, beside plain training.

Each way trains the same model from the same numbers, in this one process: losses and parameters must be plain's bit for
bit, and within TOLERANCE where the optimizer steps on the CPU. The table has the bytes on the device between steps, the
peak of a step and its time. A way that raises is a result, and its traceback is in the output. `--device sim` tries the
program without a GPU, on tensors of the CPU over a simulated device, which counts no bytes.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import vdnn
from benchmarks.text_table import render_table

LAYERS, FROZEN = 8, 3
STEPS, WARM_UP = 6, 3
# The CPU's fused kernels round otherwise: of a parameter's largest magnitude, after all steps.
TOLERANCE = 1e-4
PLAIN, ON_CPU = "plain", "optimizer, steps on the CPU"
# Options of the session beside the model and the optimizer. Gradients and parameters follow from the optimizer.
WAYS: dict[str, dict[str, Any]] = {
    "optimizer": {},
    "optimizer, gradients": {"gradients": True},
    "optimizer, deferred": {"optimizer_step": "deferred"},
    "optimizer, gradients, deferred": {"optimizer_step": "deferred", "gradients": True},
    "frozen parameters": {"parameters": "frozen"},
    "all parameters": {"parameters": "all"},
    ON_CPU: {"optimizer_on": "cpu"},
}


@dataclass(frozen=True, slots=True)
class Size:
    width: int
    batch: int


SIZES = {"cuda": Size(2048, 2048), "sim": Size(64, 16)}


@dataclass(frozen=True, slots=True)
class Trained:
    """One way to train. `furthest` is the largest difference from plain's parameters, of a parameter's largest
    magnitude. Bytes are None where the device counts none."""

    way: str
    same_bits: bool
    furthest: float
    step_ms: float
    resting_bytes: int | None
    peak_bytes: int | None


@dataclass(frozen=True, slots=True)
class _Run:
    values: list[Tensor]  # losses, then parameters
    step_ms: float
    resting_bytes: int | None
    peak_bytes: int | None


def trainings(device: str) -> Iterator[Trained | str]:
    """Plain training, then each way. A way that fails is its reason."""
    plain = _run(device, None)
    yield Trained(PLAIN, True, 0.0, plain.step_ms, plain.resting_bytes, plain.peak_bytes)
    for way, options in WAYS.items():
        try:
            found = _run(device, options)
        except Exception as error:  # a way that fails must not hide the others
            traceback.print_exc()
            yield f"{way}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            continue
        finally:
            gc.collect()
        pairs = list(zip(plain.values, found.values, strict=True))
        same = all(torch.equal(one, other) for one, other in pairs)
        furthest = max(float((one - other).abs().max() / one.abs().max()) for one, other in pairs)
        yield Trained(way, same, furthest, found.step_ms, found.resting_bytes, found.peak_bytes)


def wrong(trained: Trained) -> str:
    """The reason why a way is a failure, or an empty text."""
    if trained.way == ON_CPU:
        return "" if trained.furthest <= TOLERANCE else f"parameters are {trained.furthest:.1e} from plain's"
    return "" if trained.same_bits else "losses or parameters differ from plain's"


def _run(device: str, options: dict[str, Any] | None) -> _Run:
    place, size = "cuda" if device == "cuda" else "cpu", SIZES[device]
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(size.width, size.width), nn.GELU()) for _ in range(LAYERS)]
    model = nn.Sequential(*layers).to(place)
    for layer in layers[:FROZEN]:
        layer.requires_grad_(False)
    trained = [one for one in model.parameters() if one.requires_grad]
    batches = [torch.randn(size.batch, size.width).to(place) for _ in range(STEPS)]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, fused=options == WAYS[ON_CPU] or None)
    if options is None:
        return _steps(place, model, optimizer, batches)
    with vdnn.offload(device=device, min_bytes="1KiB", model=model, optimizer=optimizer, **options):
        return _steps(place, model, optimizer, batches)


def _steps(place: str, model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[Tensor]) -> _Run:
    cuda: Any = torch.cuda if place == "cuda" else None
    losses, times_ms, peaks, resting = [], [], [], None
    for batch in batches:
        if cuda is not None:
            cuda.synchronize()
            cuda.reset_peak_memory_stats()
        begin_ns = time.perf_counter_ns()
        loss = model(batch).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().cpu())
        del loss
        if cuda is not None:
            cuda.synchronize()
            resting = cuda.memory_allocated()
            peaks.append(cuda.max_memory_allocated())
        times_ms.append((time.perf_counter_ns() - begin_ns) / 1e6)
    values = losses + [one.detach().cpu().clone() for one in model.parameters()]
    return _Run(values, statistics.median(times_ms[WARM_UP:]), resting, max(peaks[WARM_UP:], default=None))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.on_a_gpu.training_state_ways", description=__doc__)
    parser.add_argument("--device", choices=tuple(SIZES), default="cuda")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the rows there, line by line")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("training_state_ways: torch sees no GPU here: --device sim tries the program.", file=sys.stderr)
        return 2
    torch.use_deterministic_algorithms(True)
    rows, problems = [], []
    for found in trainings(options.device):
        if isinstance(found, str):
            problems.append(found)
            continue
        rows.append(found)
        problems += [f"{found.way}: {reason}" for reason in [wrong(found)] if reason]
        if options.json is not None:
            with options.json.open("a") as file:
                file.write(json.dumps(asdict(found)) + "\n")
    print(render_table(f"Training state on the host, on {options.device}", HEADER, [*map(_shown, rows)], problems))
    return 1 if problems else 0


HEADER = ("on the host", "bits", "between steps", "peak", "step")


def _shown(row: Trained) -> tuple[str, ...]:
    bits = "as plain" if row.same_bits else f"{row.furthest:.0e} off"
    sizes = ("-" if one is None else f"{one / 2**20:.0f} MiB" for one in (row.resting_bytes, row.peak_bytes))
    return (row.way, bits, *sizes, f"{row.step_ms:.1f} ms")


if __name__ == "__main__":
    sys.exit(main())
