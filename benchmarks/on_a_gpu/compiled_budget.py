"""Part of gpu-proof: a model that is compiled as a whole, without a budget and under one of vdnn.compile_options.

The budget is that of the inputs, parameters and output, and SHARE of what torch's own choice saves beside them. What
was saved is counted from the graph, on any device; on a GPU the table also has the peak of a step. Gradients must be
those without a budget up to TOLERANCE of the largest magnitude, since Inductor fuses recomputed operations with others.
`--device cpu` tries the program without a GPU; compiling needs a C++ compiler there.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import vdnn
from benchmarks.text_table import render_table

SHARE = 0.5
TOLERANCE = 1e-4
STEPS, WARM_UP = 6, 2


@dataclass(frozen=True, slots=True)
class Size:
    width: int
    depth: int
    batch: int
    hardware: str | None  # None: the card is measured


SIZES = {"cuda": Size(1024, 6, 4096, None), "cpu": Size(32, 2, 64, "h100")}


@dataclass(frozen=True, slots=True)
class Compiled:
    """A compiled step. `saved_bytes` are those beside inputs, parameters and output. `furthest` is the largest
    difference from the gradients without a budget, of a gradient's largest magnitude."""

    budget_bytes: int | None
    held_bytes: int
    saved_bytes: int
    peak_bytes: int | None
    step_ms: float
    furthest: float


class Blocks(nn.Module):
    """Residual perceptrons on norms of their inputs."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(depth)
        )

    def forward(self, x: Tensor) -> Tensor:
        for norm, block in zip(self.norms, self.blocks, strict=True):
            x = x + block(norm(x))
        return x


def compiled_pair(device: str) -> list[Compiled]:
    """The step without a budget, and under one."""
    size = SIZES[device]
    torch.manual_seed(0)
    model = Blocks(size.width, size.depth).to(device)
    x = torch.randn(size.batch, size.width).to(device)
    free, gradients = _trained(model, x, torch.compile(model), None, None)
    budget = free.held_bytes - round((1 - SHARE) * free.saved_bytes)
    torch._dynamo.reset()
    options = vdnn.compile_options(budget=budget, hardware=size.hardware)
    return [free, _trained(model, x, torch.compile(model, options=options), budget, gradients)[0]]


def wrong(pair: Sequence[Compiled]) -> list[str]:
    under = pair[1]
    problems = []
    if under.budget_bytes is not None and under.held_bytes > under.budget_bytes:
        problems.append(f"{under.held_bytes} bytes are held, of a budget of {under.budget_bytes}")
    if not under.furthest <= TOLERANCE:  # also for NaN
        problems.append(f"gradients are {under.furthest:.1e} from those without a budget")
    return problems


def _trained(
    model: nn.Module, x: Tensor, compiled: Any, budget: int | None, expected: list[Tensor] | None
) -> tuple[Compiled, list[Tensor]]:
    cuda: Any = torch.cuda if x.is_cuda else None
    times_ms, peak, held, saved = [], None, 0, 0
    for _ in range(STEPS):
        model.zero_grad(set_to_none=True)
        if cuda is not None:
            cuda.synchronize()
            cuda.reset_peak_memory_stats()
        begin_ns = time.perf_counter_ns()
        storages: dict[int, Tensor] = {}

        def pack(tensor: Tensor, storages: dict[int, Tensor] = storages) -> Tensor:
            storages.setdefault(tensor.untyped_storage().data_ptr(), tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one):
            out = compiled(x)
        held, saved = _bytes(storages, model, x, out)
        out.square().mean().backward()
        del out, storages
        if cuda is not None:
            cuda.synchronize()
            peak = cuda.max_memory_allocated()
        times_ms.append((time.perf_counter_ns() - begin_ns) / 1e6)
    gradients = [one.grad.clone() for one in model.parameters() if one.grad is not None]
    pairs = zip(gradients, gradients if expected is None else expected, strict=True)
    furthest = max(float((one - other).abs().max() / other.abs().max()) for one, other in pairs)
    return Compiled(budget, held, saved, peak, statistics.median(times_ms[WARM_UP:]), furthest), gradients


def _bytes(storages: dict[int, Tensor], model: nn.Module, x: Tensor, out: Tensor) -> tuple[int, int]:
    """Bytes that are held between forward and backward, and those of saves that are no input, parameter or output."""
    around = {one.untyped_storage().data_ptr(): one for one in (x, out, *model.parameters())}
    saved = sum(one.untyped_storage().nbytes() for address, one in storages.items() if address not in around)
    return saved + sum(one.untyped_storage().nbytes() for one in around.values()), saved


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.on_a_gpu.compiled_budget", description=__doc__)
    parser.add_argument("--device", choices=tuple(SIZES), default="cuda")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the rows there, line by line")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("compiled_budget: torch sees no GPU here: --device cpu tries the program without one.", file=sys.stderr)
        return 2
    pair = compiled_pair(options.device)
    problems = wrong(pair)
    if options.json is not None:
        options.json.write_text("".join(json.dumps(asdict(one)) + "\n" for one in pair))
    print(render_table(f"A model compiled as a whole, on {options.device}", HEADER, [*map(_shown, pair)], problems))
    return 1 if problems else 0


HEADER = ("budget", "held", "saved", "peak", "step", "gradients")


def _shown(row: Compiled) -> tuple[str, ...]:
    sizes = (row.budget_bytes, row.held_bytes, row.saved_bytes, row.peak_bytes)
    budget, *others = ("-" if one is None else vdnn.format_bytes(one) for one in sizes)
    gradients = "-" if row.budget_bytes is None else f"{row.furthest:.0e} off" if row.furthest else "the same"
    return (budget, *others, f"{row.step_ms:.2f} ms", gradients)


if __name__ == "__main__":
    sys.exit(main())
