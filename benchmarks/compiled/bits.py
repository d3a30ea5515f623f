"""The bits of compiled steps: outputs and gradients under budgets, beside the same backend without one, on the CPU.

Each workload runs at its tiny size. What is on the device between forward and backward is read off the autograd graph,
and has to be what was planned, to the byte.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed

from benchmarks.compiled import programs, published_models
from benchmarks.compiled.joint import Step
from benchmarks.compiled.measured import Backend, Run, aot_eager, difference, equal_bits, inductor, measured_step
from benchmarks.harness.workload_sources import SOURCES
from benchmarks.harness.workloads import WORKLOADS, workload_named
from benchmarks.progress import Progress
from benchmarks.text_table import render_table
from vdnn.bytesize import format_bytes
from vdnn.hardware import load_profile
from vdnn.integrations.compile_options import BudgetPartitioner

# Budgets between the least that a region can hold and what torch's own cut holds.
SHARES = (0.8, 0.5, 0.2)
BACKENDS: dict[str, Callable[[BudgetPartitioner | None], Backend]] = {"aot_eager": aot_eager, "inductor": inductor}
# Thousands of operations each: every cut of them takes minutes.
LARGE = ("resnet1202", "densenet201", "vgg316", "vgg416")
_CARD = "titan-x"
_LEAST = re.compile(r"expected at least .* \((\d+) bytes\)")


@dataclass(frozen=True, slots=True)
class BitsRow:
    """One network under one budget. `difference` is the largest one of a tensor of the step, as a share of its norm,
    and `own_difference` that of two runs of Inductor without a budget. `error` is why a network was not compiled."""

    network: str
    backend: str
    regions: int = 0
    budget_bytes: int = 0
    cut_bytes: int = 0
    offloaded_bytes: int = 0
    planned_bytes: int = 0
    saved_bytes: int = 0
    difference: float = 0.0
    own_difference: float = 0.0
    equal: bool = False
    error: str = ""

    @property
    def cells(self) -> list[str]:
        """The row as text."""
        if self.error:
            return [self.network, self.backend, "", "", "", "", "", "", self.error]
        return [
            self.network,
            self.backend,
            str(self.regions),
            format_bytes(self.budget_bytes),
            format_bytes(self.cut_bytes),
            format_bytes(self.offloaded_bytes),
            str(self.planned_bytes),
            str(self.saved_bytes),
            "equal" if self.equal else f"{self.difference:.1e}",
        ]


HEADER = ("network", "backend", "regions", "budget", "torch's cut", "offloaded", "planned", "saved", "bits")


def names() -> list[str]:
    """The workloads that have a tiny size, one for each tiny size, and those of transformers."""
    seen, found = set[str](), []
    for name, spec in WORKLOADS.items():
        shape = repr(spec.tiny)
        if spec.tiny is not None and shape not in seen and name not in LARGE:
            seen.add(shape)
            found.append(name)
    source = SOURCES["transformers"]
    if source.why_not() is not None:
        return found
    return [*found, *source.names, *published_models.MODELS]


def rows_of(name: str, backend: str, clones: Path | None = None) -> Iterator[BitsRow]:
    """One row for each budget. `clones` has the repositories of programs."""
    torch.manual_seed(0)
    step, inputs = _made(name, clones)
    make = BACKENDS[backend]
    plain = measured_step(step, inputs, make(None))
    own_difference = difference(measured_step(step, inputs, make(None)), plain) if backend == "inductor" else 0.0
    most = plain.ends_bytes + plain.saved_bytes
    for share in SHARES:
        chosen, run = _under(plain.ends_bytes + int(share * plain.saved_bytes), step, inputs, make)
        yield BitsRow(
            name,
            backend,
            len(chosen.regions),
            chosen.budget_bytes,
            most,
            sum(one.offloaded_bytes for one in chosen.regions),
            sum(one.saved_bytes for one in chosen.regions),
            run.saved_bytes,
            difference(run, plain),
            own_difference,
            equal_bits(run, plain),
        )


def _made(name: str, clones: Path | None) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    if clones is not None:
        return programs.made(name, clones)
    is_published = name in published_models.MODELS
    workload = published_models.made(name) if is_published else workload_named(name).make_at(None, is_tiny=True)[0]
    return Step(workload), workload.inputs


def _under(
    budget_bytes: int,
    step: nn.Module,
    inputs: tuple[torch.Tensor, ...],
    make: Callable[[BudgetPartitioner | None], Backend],
) -> tuple[BudgetPartitioner, Run]:
    """The step under the budget, or under the least that its regions name if it is too small for one of them."""
    while True:
        chosen = _partitioner(budget_bytes)
        try:
            return chosen, measured_step(step, inputs, make(chosen))
        except BackendCompilerFailed as error:
            least = _LEAST.search(str(error))
            if least is None or int(least[1]) <= budget_bytes:
                raise
            budget_bytes = int(least[1])


def write_bits(path: Path, chosen: Iterable[str], backend: str, clones: Path | None = None) -> None:
    """Runs what the file does not have yet, and writes rows and table after each workload."""
    rows_path = path.with_suffix(".jsonl")
    lines = rows_path.read_text().splitlines() if rows_path.exists() else []
    rows = [BitsRow(**json.loads(line)) for line in lines]
    done = {row.network for row in rows if row.backend == backend and not row.error}
    missing = [name for name in chosen if name not in done]
    progress = Progress("compiled bits", len(missing))
    for name in missing:
        progress.begin(f"{name} by {backend}")
        rows = [row for row in rows if (row.network, row.backend) != (name, backend)]
        try:
            with torch._functorch.config.patch(enable_autograd_cache=False):
                rows += rows_of(name, backend, clones)
        except Exception as error:  # a model that cannot be compiled is a row, too
            rows.append(BitsRow(name, backend, error=f"{type(error).__name__}: {error}".splitlines()[0]))
        rows_path.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows))
        path.write_text(table_of(rows))
    print(table_of(rows))


def table_of(rows: list[BitsRow]) -> str:
    """The rows as a table, with what differs counted."""
    remarks = []
    for backend in BACKENDS:
        ran = [row for row in rows if row.backend == backend and not row.error]
        if ran:
            remarks.append(_counted(backend, ran))
    remarks.append("Each region has all of the budget. 'bits' that differ are given as the largest share of a norm.")
    title = "Compiled steps under vdnn.compile_options, beside the same backend without, at tiny sizes on the CPU"
    return render_table(title, HEADER, [row.cells for row in rows], remarks) + "\n"


def _counted(backend: str, ran: list[BitsRow]) -> str:
    same = sum(row.equal for row in ran)
    exact = sum(row.planned_bytes == row.saved_bytes for row in ran)
    networks = len({row.network for row in ran})
    text = (
        f"{backend}: {networks} networks. Loss, buffers and gradients are equal bit for bit in "
        f"{same} of {len(ran)} rows; what is saved on the device is what was planned, to the byte, in {exact}."
    )
    if same < len(ran):
        text += (
            f" The largest difference is {max(row.difference for row in ran):.1e} of a tensor's norm; two runs without "
            f"a budget differ by {max(row.own_difference for row in ran):.1e}."
        )
    return text


def _partitioner(budget_bytes: int) -> BudgetPartitioner:
    return BudgetPartitioner(budget_bytes, load_profile(_CARD))
