"""Compares auto with torch.utils.checkpoint: the same network, the same card, and the memory of checkpointing.

    python -m benchmarks.plans.beside_checkpoint [--networks resnet50,vit_large] [--hardware h100]

Torch checkpoints each block of the network (not re-entrant), without vdnn, in a step without data: its peak and its
time are those of a virtual machine. Then `auto` and `auto-offload` get that peak as their budget, on the unmodified
network. Torch recomputes whole blocks, whatever they cost.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks.models.workload import Workload
from benchmarks.plans.plan_matrix import NETWORKS
from benchmarks.progress import Progress
from benchmarks.text_table import render_table
from vdnn.hardware import load_profile
from vdnn.planning.costs import profile_costs
from vdnn.planning.least_memory import least_bytes
from vdnn.planning.planned_step import plan_step
from vdnn.runtime.machine.virtual_machine import VirtualMachine
from vdnn.runtime.rehearsal.rehearsal import rehearse, subject_of
from vdnn.runtime.rehearsal.stage import stage

# The classes of the blocks of each network.
BLOCKS = {
    "resnet50": ("Bottleneck",),
    "densenet121": ("DenseBlock",),
    "vit_large": ("Layer",),
    "bert_large": ("Layer",),
    "gpt2_xl": ("Block",),
    "llama_8b": ("Layer",),
}
HARDWARE = ("v100-32", "h100", "h200")


def checkpointed(model: nn.Module, kinds: Sequence[str]) -> int:
    """Checkpoint the forward of each block. Returns the number of blocks."""
    blocks = [module for module in model.modules() if type(module).__name__ in kinds]
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return len(blocks)


def run_checkpointed(
    make: Callable[[int], Workload], batch: int, hardware: str, kinds: Sequence[str]
) -> tuple[int, int]:
    """The peak and the time of the second step."""
    with VirtualMachine(hardware, workspaces=True) as machine, stage(machine):
        workload = make(batch)
        machine.tracker.track([workload.model, workload.inputs])
        if not checkpointed(workload.model, kinds):
            raise ValueError(f"expected blocks of {', '.join(kinds)}, found none.")
        for _ in range(2):
            workload.model.zero_grad(set_to_none=True)
            machine.reset_peak()
            begin_ns = machine.now_ns
            workload.step()
        return machine.peak_bytes, machine.now_ns - begin_ns


def compare(name: str, hardware: str) -> dict[str, Any]:
    make, batch = NETWORKS[name]
    peak_bytes, step_ns = run_checkpointed(make, batch, hardware, BLOCKS[name])
    profile = load_profile(hardware)
    recording = rehearse(subject_of(make, batch), profile).recording
    budget_bytes = max(peak_bytes, least_bytes(recording))
    cell: dict[str, Any] = {
        "network": name,
        "batch": batch,
        "hardware": hardware,
        "keep_ns": recording.compute_ns,
        "keep_peak_bytes": recording.peak_bytes,
        "checkpoint_ns": step_ns,
        "checkpoint_peak_bytes": peak_bytes,
        "budget_bytes": budget_bytes,
    }
    for policy in ("auto", "auto-offload"):
        planned = plan_step(recording, profile_costs(profile), budget_bytes, policy)
        cell[policy] = {"step_ns": planned.timeline.step_ns, "peak_bytes": planned.timeline.peak_bytes}
    return cell


def render(cells: Sequence[dict[str, Any]]) -> str:
    rows = []
    for cell in cells:
        keep_ns, keep_peak = cell["keep_ns"], cell["keep_peak_bytes"]
        raised = "" if cell["budget_bytes"] == cell["checkpoint_peak_bytes"] else " *"
        rows.append(
            (
                f"{cell['network']} ({cell['batch']}), {cell['hardware']}",
                f"{100 * cell['checkpoint_peak_bytes'] / keep_peak:.0f} %{raised}",
                *(
                    f"{100 * (step_ns / keep_ns - 1):.1f} %"
                    for step_ns in (cell["checkpoint_ns"], cell["auto-offload"]["step_ns"], cell["auto"]["step_ns"])
                ),
            )
        )
    slower = [row[0] for row, cell in zip(rows, cells, strict=True) if cell["auto"]["step_ns"] > cell["checkpoint_ns"]]
    remarks = [
        "Slowdown over everything kept, all in virtual time. The first column of numbers is the peak of checkpointing, "
        "which is the budget of both plans (*: it is below the least that offload reaches, which is the budget then).",
        f"auto is slower than checkpointing in {len(slower)} of {len(rows)}: {', '.join(slower) or 'none'}.",
    ]
    return render_table(
        "auto beside torch.utils.checkpoint of every block",
        ("network (batch), card", "peak", "checkpoint", "auto-offload", "auto"),
        rows,
        remarks,
    )


def cells(networks: Sequence[str], hardware: Sequence[str]) -> Iterator[dict[str, Any]]:
    progress = Progress("beside_checkpoint", len(networks) * len(hardware))
    for name in networks:
        for card in hardware:
            progress.begin(f"{name} on {card}")
            yield compare(name, card)
    progress.end()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.plans.beside_checkpoint", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--networks", default=",".join(BLOCKS), metavar="NAMES", help="separated by commas")
    parser.add_argument("--hardware", default=",".join(HARDWARE), metavar="NAMES")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures, a line for each")
    options = parser.parse_args(arguments)
    networks = options.networks.split(",")
    for name in networks:
        if name not in BLOCKS:
            raise SystemExit(f"beside_checkpoint: expected networks among {', '.join(BLOCKS)}, got {name!r}.")
    found = []
    for cell in cells(networks, options.hardware.split(",")):
        found.append(cell)
        if options.json is not None:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text("".join(json.dumps(one) + "\n" for one in found))
    print(render(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
