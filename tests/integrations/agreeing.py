"""Training loops whose ranks agree on plans between steps: jobs for tests.integrations.ranks."""

from __future__ import annotations

import hashlib
import threading
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

import vdnn
from tests.integrations.parallel_training import batches, blocks, parameters_of
from vdnn.integrations.ranks import TogetherSession, offload_together


def train(rank: int, together: TogetherSession | None, steps: int = 20) -> list[tuple[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = DistributedDataParallel(blocks())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for x in batches(rank, steps):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if together is not None:
            together.step()
    return parameters_of(model)


def agree(rank: int, budget: str) -> dict[str, Any]:
    plain = train(rank, None)
    with (
        vdnn.VirtualMachine("titan-x", fake=False) as machine,
        offload_together(budget, policy="prefix-cut", device=machine, min_bytes=0) as together,
    ):
        ours = train(rank, together)
    assert together.plan is not None
    return {
        "differing": [name for (name, one), (_, other) in zip(plain, ours, strict=True) if not torch.equal(one, other)],
        "plan": hashlib.sha256(repr(together.plan).encode()).hexdigest(),
        "offloaded_bytes": together.plan.offloaded_bytes,
        "moved": together.session.counters.storages,
        "difference": together.session._engine.steps.first_difference,
    }


def one_cannot_meet_its_budget(rank: int) -> None:
    with (
        vdnn.VirtualMachine("titan-x", fake=False) as machine,
        offload_together("1KiB" if rank == 1 else "min", device=machine, min_bytes=0) as together,
    ):
        train(rank, together)


def one_does_not_come(rank: int) -> None:
    with (
        vdnn.VirtualMachine("titan-x", fake=False) as machine,
        offload_together("min", device=machine, min_bytes=0, limit_s=2, warmup_steps=0) as together,
    ):
        if rank == 0:
            blocks()(next(batches(rank))).sum().backward()
            together.step()


def nothing(rank: int) -> None:
    """Has the module imported."""


def one_waits_for_ever(rank: int) -> None:
    if rank == 1:
        threading.Event().wait()
