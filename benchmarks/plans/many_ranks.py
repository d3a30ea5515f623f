"""Plans one rank of many, without the others: Llama 8B under FSDP2, for a card that need not be present.

    python -m benchmarks.plans.many_ranks --ranks 64 --hardware h100 --budget 40GiB
    python -m benchmarks.plans.many_ranks --layers 32 --batch 2          # the whole model: minutes

FSDP2 runs over torch's fake process group on a virtual machine: parameters, gradients and the optimizer's moments are
sharded, parameters are gathered layer by layer, and every byte of the rank counts. Collectives move nothing and take
no time there, so the time is that of compute and of copies over the rank's own link. A network adds its time to this,
with and without a plan.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import vdnn
from benchmarks.models.llama import OF_8B, SLICE, TOKENS, LlamaShape, llama
from benchmarks.progress import Progress
from benchmarks.text_table import render_table
from vdnn.bytesize import format_bytes
from vdnn.hardware import load_profile
from vdnn.planning.budget import parse_budget
from vdnn.planning.costs import profile_costs
from vdnn.planning.least_memory import least_bytes
from vdnn.planning.planned_step import PlannedStep, plan_step
from vdnn.step.plan import Action
from vdnn.step.recording import Recording
from vdnn.step.timeline import Timeline

_COLUMNS = (
    "At rest: the parameters and moments of a rank. Kept, least: the peak with everything kept, and the least that "
    "offload reaches. Offloaded, recomputed: bytes and shares of what the step saves."
)
_STEPS = 3  # one to warm up, one to record, one more to measure


@dataclass(frozen=True, slots=True)
class RankStep:
    """The step of a rank: recorded with everything kept, planned, and executed under the plan."""

    ranks: int
    recording: Recording
    planned: PlannedStep
    executed: Timeline

    @property
    def saved_bytes(self) -> int:
        return sum(lifetime.nbytes for lifetime in self.recording.lifetimes)

    def bytes_of(self, *actions: Action) -> int:
        """The bytes of saved storages that have one of these actions in the plan."""
        lifetimes = zip(self.recording.lifetimes, self.planned.plan.lifetimes, strict=False)
        return sum(one.nbytes for one, planned in lifetimes if planned.action in actions)


def rank_step(ranks: int, shape: LlamaShape, batch: int, tokens: int, hardware: str, budget: str) -> RankStep:
    """The step of rank 0. All ranks have the same step."""
    profile = load_profile(hardware)
    recording, _ = _trained(ranks, shape, batch, tokens, hardware, {"policy": "vdnn-all"})
    assert recording is not None, "the session recorded a step"
    budget_bytes = parse_budget(budget).bytes_for(profile.memory_bytes, least_bytes(recording))
    planned = plan_step(recording, profile_costs(profile), budget_bytes)
    _, executed = _trained(ranks, shape, batch, tokens, hardware, {"plan": planned.plan})
    assert executed is not None, "the session measured a step"
    return RankStep(ranks, recording, planned, executed)


def _trained(
    ranks: int, shape: LlamaShape, batch: int, tokens: int, hardware: str, decided_by: dict[str, Any]
) -> tuple[Recording | None, Timeline | None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        mesh = init_device_mesh("cpu", (ranks,))
        with vdnn.VirtualMachine(hardware) as machine:
            workload = llama(batch, tokens, shape)
            model: Any = workload.model
            for layer in model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
            with vdnn.offload(**decided_by, device=machine, measure=True) as session:
                for _ in range(_STEPS):
                    workload.loss(model(*workload.inputs)).backward()  # type: ignore[no-untyped-call]
                    optimizer.step()
                    optimizer.zero_grad()
        return session.recording, session.timeline
    finally:
        dist.destroy_process_group()


def render(steps: Sequence[RankStep], remark: str) -> str:
    header = (
        "ranks",
        "at rest",
        "kept",
        "least",
        "budget",
        "peak",
        "offloaded",
        "recomputed",
        "ms kept",
        "ms",
    )
    rows = []
    for step in steps:
        plan, saved = step.planned.plan, step.saved_bytes
        recomputed = step.bytes_of(Action.RECOMPUTE, Action.COMPRESS)
        rows.append(
            (
                str(step.ranks),
                format_bytes(step.recording.resident_bytes),
                format_bytes(step.recording.peak_bytes),
                format_bytes(least_bytes(step.recording)),
                format_bytes(plan.budget_bytes or 0),
                format_bytes(step.executed.peak_bytes),
                f"{format_bytes(step.bytes_of(Action.OFFLOAD))}, {step.bytes_of(Action.OFFLOAD) / saved:.0%}",
                f"{format_bytes(recomputed)}, {recomputed / saved:.0%}",
                f"{step.recording.compute_ns / 1e6:.0f}",
                f"{step.executed.step_ns / 1e6:.0f}",
            )
        )
    return render_table("One rank of many: Llama 8B under FSDP2", header, rows, [remark, _COLUMNS])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--hardware", default="h100", help="a profile by name, or its file")
    parser.add_argument("--budget", default="80%", help="of each rank: 40GiB, 80%% of the card, min")
    parser.add_argument("--layers", type=int, default=SLICE, help="of the 32 that 8B has")
    parser.add_argument("--batch", type=int, default=1, help="sequences of a rank")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of each sequence")
    given = parser.parse_args(arguments)
    shape = LlamaShape(layers=given.layers)
    steps, progress = [], Progress("many ranks", len(given.ranks))
    for ranks in given.ranks:
        progress.begin(f"{ranks} ranks")
        steps.append(rank_step(ranks, shape, given.batch, given.tokens, given.hardware, given.budget))
    progress.end()
    remark = (
        f"{given.layers} of {OF_8B.layers} layers, {given.batch} x {given.tokens} tokens a rank, bfloat16, AdamW, on "
        f"{given.hardware}; virtual time, in which collectives take none."
    )
    print(render(steps, remark))
    return 0


if __name__ == "__main__":
    sys.exit(main())
