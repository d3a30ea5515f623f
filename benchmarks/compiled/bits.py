"""The bits of compiled steps: outputs and gradients under budgets, beside the same backend without one, on the CPU.

Each workload runs at its tiny size. What is on the device between forward and backward is read off the autograd graph,
and has to be what was planned, to the byte.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import BackendCompilerFailed

from benchmarks.compiled import published_models
from benchmarks.compiled.joint import Step
from benchmarks.harness.workload_sources import SOURCES
from benchmarks.harness.workloads import WORKLOADS, workload_named
from benchmarks.progress import Progress
from benchmarks.text_table import render_table
from vdnn.bytesize import format_bytes
from vdnn.hardware import load_profile
from vdnn.integrations.compile_options import BudgetPartitioner
from vdnn.runtime.storage import graph_copies

# Budgets between the least that a region can hold and what torch's own cut holds.
SHARES = (0.8, 0.5, 0.2)
_CARD, _ENOUGH, _SEED = "titan-x", 1 << 50, 3
_LEAST = re.compile(r"expected at least .* \((\d+) bytes\)")


class Run(NamedTuple):
    """A step: its loss, buffers and gradients, and the bytes that were saved on the device."""

    values: list[torch.Tensor]
    saved_bytes: int


def names() -> list[str]:
    """The workloads that have a tiny size, one for each tiny size, and those of transformers."""
    seen, found = set[str](), []
    for name, spec in WORKLOADS.items():
        shape = repr(spec.tiny)
        if spec.tiny is not None and shape not in seen:
            seen.add(shape)
            found.append(name)
    source = SOURCES["transformers"]
    if source.why_not() is not None:
        return found
    return [*found, *source.names, *published_models.MODELS]


def as_it_is(module: torch.fx.GraphModule, _inputs: object) -> Callable[..., Any]:
    """Runs a graph without compiling it, as torch's backend aot_eager does."""

    def run(arguments: list[Any]) -> Any:
        return module.forward(*arguments)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def stepped(step: Step, inputs: tuple[torch.Tensor, ...], **how: Any) -> Run:
    """One step of a copy of the model, compiled."""
    torch._dynamo.reset()
    step = copy.deepcopy(step)
    torch.manual_seed(_SEED)
    loss = torch.compile(step, **how)(*inputs)
    state = [*step.parameters(), *step.buffers(), *inputs, loss, *filter(torch.is_tensor, vars(step.loss).values())]
    own = {one.untyped_storage().data_ptr() for one in state}
    saved = [one for one in _saved_by(loss) if not graph_copies.is_on_host(one)]
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in saved}
    loss.backward()
    gradients = [one.grad for one in step.parameters() if one.grad is not None]
    saved_bytes = sum(size for address, size in storages.items() if address not in own)
    return Run([loss.detach(), *step.buffers(), *gradients], saved_bytes)


def _saved_by(loss: torch.Tensor) -> Iterator[torch.Tensor]:
    pending, seen = [loss.grad_fn], set[Any]()
    while pending:
        node: Any = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if "CompiledFunction" in node.name():
            yield from node.saved_tensors
            yield from getattr(node, "_tensors_no_vc_check", ())
        pending.extend(one for one, _ in node.next_functions)


def rows_of(name: str) -> Iterator[list[str]]:
    """One row for each budget."""
    torch.manual_seed(0)
    is_published = name in published_models.MODELS
    workload = published_models.made(name) if is_published else workload_named(name).make_at(None, is_tiny=True)[0]
    step = Step(workload)
    plain = stepped(step, workload.inputs, backend="aot_eager")
    ample = _partitioner(_ENOUGH)
    stepped(step, workload.inputs, backend=_backend(ample))
    most = sum(one.inputs_and_outputs_bytes + one.saved_bytes for one in ample.regions)
    ends = sum(one.inputs_and_outputs_bytes for one in ample.regions)
    for share in SHARES:
        chosen = _partitioner(ends + int(share * (most - ends)))
        try:
            run = stepped(step, workload.inputs, backend=_backend(chosen))
        except BackendCompilerFailed as error:
            least = _LEAST.search(str(error))
            if least is None:
                raise
            chosen = _partitioner(int(least[1]))
            run = stepped(step, workload.inputs, backend=_backend(chosen))
        planned = sum(one.saved_bytes for one in chosen.regions)
        yield [
            name,
            str(len(chosen.regions)),
            format_bytes(chosen.budget_bytes),
            format_bytes(most),
            format_bytes(sum(one.offloaded_bytes for one in chosen.regions)),
            str(planned),
            str(run.saved_bytes),
            "equal" if _equal(run.values, plain.values) else "DIFFER",
        ]


HEADER = ("network", "regions", "budget", "torch's cut", "offloaded", "planned", "saved", "bits")


def write_bits(path: Path) -> None:
    """Runs everything, and writes the table after each workload."""
    rows: list[list[str]] = []
    known = names()
    progress = Progress("compiled bits", len(known))
    for name in known:
        progress.begin(name)
        try:
            with torch._functorch.config.patch(enable_autograd_cache=False):
                rows += rows_of(name)
        except Exception as error:  # a model that cannot be compiled is a row, too
            rows.append([name, "", "", "", "", "", "", f"{type(error).__name__}"])
        path.write_text(table_of(rows))
    print(table_of(rows))


def table_of(rows: list[list[str]]) -> str:
    """The rows as a table, with what differs counted."""
    ran = [row for row in rows if row[1]]
    same = sum(row[-1] == "equal" for row in ran)
    exact = sum(row[5] == row[6] for row in ran)
    remarks = [
        f"{len({row[0] for row in ran})} networks. Loss, buffers and gradients equal those of aot_eager bit for bit in "
        f"{same} of {len(ran)} rows; what is saved on the device is what was planned, to the byte, in {exact}.",
        "Regions share no budget: with several, each has all of it.",
    ]
    title = "Compiled steps under vdnn.compile_options, beside aot_eager, at tiny sizes on the CPU"
    return render_table(title, HEADER, rows, remarks) + "\n"


def _equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


def _partitioner(budget_bytes: int) -> BudgetPartitioner:
    return BudgetPartitioner(budget_bytes, load_profile(_CARD))


def _backend(partitioner: BudgetPartitioner) -> Any:
    return aot_autograd(fw_compiler=as_it_is, partition_fn=partitioner, keep_inference_input_mutations=True)
