"""Training loops over several processes, each run plain and inside a session: jobs for tests.integrations.ranks.

Each returns facts: the names of parameters that differ from the plain run in any bit, a digest of the parameters, and
how many storages were offloaded.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import vdnn
from tests.runtime.rigs.side_by_side import alive, same_bits
from vdnn.runtime.session.session import Session
from vdnn.step.plan import Plan
from vdnn.step.timeline import Timeline

STEPS = 20
WIDTH = 16
BATCH = 128  # so large that activations, and not the optimizer, make the peak


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))
        return out


def blocks(count: int = 3) -> nn.Sequential:
    return nn.Sequential(*[Block() for _ in range(count)])


@contextlib.contextmanager
def moving(how: str) -> Iterator[Session]:
    """A session: "moves" offloads everything, and another name plans for the least memory by that policy."""
    if how == "moves":
        with vdnn.offload(
            "vdnn-all", device="sim", min_bytes=0, limits=vdnn.Limits(offload_window=1, reload_window="4KiB")
        ) as session:
            yield session
    else:
        with (
            vdnn.VirtualMachine("titan-x", fake=False) as machine,
            vdnn.offload(how, budget="min", device=machine, min_bytes=0) as session,
        ):
            yield session
    left = alive(session)
    session.close()
    assert not left, left


Loop = Callable[[int], list[tuple[str, torch.Tensor]]]


def beside_plain(rank: int, how: str, loop: Loop) -> dict[str, Any]:
    plain = loop(rank)
    with moving(how) as session:
        ours = loop(rank)
    assert [name for name, _ in plain] == [name for name, _ in ours]
    digest = hashlib.sha256(b"".join(value.numpy().tobytes() for _, value in ours)).hexdigest()
    return {
        "differing": [name for (name, one), (_, other) in zip(plain, ours, strict=True) if not same_bits(one, other)],
        "digest": digest,
        "storages": session.counters.storages + session.counters.discarded,
        "storage_bytes": session.counters.storage_bytes,
        "planned_bytes": 0 if session.plan is None else session.plan.offloaded_bytes,
        "kept": {reason.name: count for reason, count in session.counters.kept.items()},
        "steps": session.num_steps,
        "report": session.report(),
    }


def parameters_of(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """The whole parameters, however they are sharded."""
    found = []
    for name, parameter in module.named_parameters():
        value = parameter.detach()
        if isinstance(value, DTensor):
            value = value.full_tensor()
        found.append((name, value.clone().cpu()))
    return found


def batches(rank: int, count: int = STEPS) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + rank)
    for _ in range(count):
        yield torch.randn(BATCH, WIDTH, generator=generator)


def optimise(model: nn.Module, rank: int, optimizer: torch.optim.Optimizer) -> None:
    for x in batches(rank):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


# Data parallel.


def ddp(rank: int, how: str) -> dict[str, Any]:
    def loop(rank: int) -> list[tuple[str, torch.Tensor]]:
        torch.manual_seed(0)
        model = DistributedDataParallel(blocks())
        optimise(model, rank, torch.optim.AdamW(model.parameters(), lr=1e-2))
        return parameters_of(model)

    return beside_plain(rank, how, loop)


def ddp_accumulating(rank: int, how: str) -> dict[str, Any]:
    """Each step has two batches, the first without a reduction. Clips gradients and finds unused parameters."""

    def loop(rank: int) -> list[tuple[str, torch.Tensor]]:
        torch.manual_seed(0)
        model = DistributedDataParallel(blocks(), find_unused_parameters=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for index, x in enumerate(batches(rank, 2 * STEPS)):
            with model.no_sync() if index % 2 == 0 else contextlib.nullcontext():
                model(x).square().mean().backward()
            if index % 2:
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
        return parameters_of(model)

    return beside_plain(rank, how, loop)


def fsdp2(rank: int, how: str, kind: str) -> dict[str, Any]:
    def loop(rank: int) -> list[tuple[str, torch.Tensor]]:
        torch.manual_seed(0)
        model = blocks()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        options: dict[str, Any] = {"mesh": mesh}
        if kind == "cpu offload":
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
        if kind == "mixed precision":
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in model:
            fully_shard(block, reshard_after_forward=kind != "no reshard", **options)
        fully_shard(model, **options)
        optimise(model, rank, torch.optim.AdamW(model.parameters(), lr=1e-2))
        return parameters_of(model)

    return beside_plain(rank, how, loop)


def fsdp1(rank: int, how: str) -> dict[str, Any]:
    """The older FSDP, with one flat parameter for each block."""

    def loop(rank: int) -> list[tuple[str, torch.Tensor]]:
        torch.manual_seed(0)
        wrapped = [FullyShardedDataParallel(block, device_id=torch.device("cpu")) for block in blocks()]
        model = nn.Sequential(*wrapped)
        optimise(model, rank, torch.optim.AdamW(model.parameters(), lr=1e-2))
        return parameters_of(model)

    return beside_plain(rank, how, loop)


def tensor_parallel(rank: int, how: str) -> dict[str, Any]:
    def loop(rank: int) -> list[tuple[str, torch.Tensor]]:
        torch.manual_seed(0)
        model = blocks()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model:
            parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        optimise(model, 0, torch.optim.AdamW(model.parameters(), lr=1e-2))  # all ranks see the same batches
        return parameters_of(model)

    return beside_plain(rank, how, loop)


# A pipeline.


def pipeline(rank: int, how: str, kind: str) -> dict[str, Any]:
    return beside_plain(rank, how, lambda rank: stage_of_a_pipeline(rank, kind))


def pipeline_as_planned(rank: int) -> tuple[Plan, Timeline, Timeline]:
    """Trains under 1F1B with "auto" at the least memory. Returns the plan, and the last step as predicted and
    measured. In the last stage each micro-batch is a step."""
    with (
        vdnn.VirtualMachine("titan-x", fake=False) as machine,
        vdnn.offload("auto", budget="min", device=machine, min_bytes=0, measure=True) as session,
    ):
        stage_of_a_pipeline(rank, "1F1B", steps=6)
    planned, plan, measured = session._engine.steps.predicted(), session.plan, session.timeline
    assert planned is not None
    assert plan is not None
    assert measured is not None
    return plan, planned[1], measured


def stage_of_a_pipeline(rank: int, kind: str, steps: int = STEPS) -> list[tuple[str, torch.Tensor]]:
    """Runs four micro-batches: under 1F1B a stage has several forward passes in flight."""
    torch.manual_seed(0)
    whole = blocks()
    mine = whole[:2] if rank == 0 else whole[1:]
    stage = PipelineStage(mine, rank, dist.get_world_size(), torch.device("cpu"))
    schedule = {"1F1B": Schedule1F1B, "GPipe": ScheduleGPipe}[kind]
    pipe = schedule(stage, n_microbatches=4, loss_fn=lambda out, target: (out - target).square().mean())
    optimizer = torch.optim.AdamW(mine.parameters(), lr=1e-2)
    for x in batches(0, steps):
        if rank == 0:
            pipe.step(x)
        else:
            pipe.step(target=x.flip(0), losses=[])
        optimizer.step()
        optimizer.zero_grad()
    return parameters_of(mine)


# A job that fails.


class Trouble(RuntimeError):
    pass


def one_raises(rank: int, what: str) -> None:
    """Rank 1 raises in its third step, in the forward or backward pass, while rank 0 waits for it in a reduction."""
    torch.manual_seed(0)
    model = DistributedDataParallel(blocks())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with vdnn.offload("vdnn-all", device="sim", min_bytes=0, limits=vdnn.Limits(offload_window=1)):
        for step, x in enumerate(batches(rank)):
            out = model(x)
            if rank == 1 and step == 2:
                if what == "forward":
                    raise Trouble("this rank has had enough")
                out.register_hook(_raise)
            out.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def _raise(gradient: torch.Tensor) -> None:
    raise Trouble("this rank has had enough")
