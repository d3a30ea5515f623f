"""Compiled models of two ranks, with a plan in each region and without: jobs for tests.integrations.ranks."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.compiled.measured import aot_eager
from tests.integrations.parallel_training import batches, blocks
from vdnn.hardware import load_profile
from vdnn.integrations.compile_options import BudgetPartitioner

STEPS = 2
# A card whose link is as fast as its memory, so that offloading is the cheapest.
_CARD = "titan-x"


def trained(rank: int, kind: str, partitioner: BudgetPartitioner | None) -> list[Tensor]:
    """The parameters of this rank after some steps."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    inner: Any = blocks()
    if kind == "ddp":
        # Small buckets, so that torch cuts the model into several regions, one for each of them.
        vars(dist)["_DEFAULT_FIRST_BUCKET_BYTES"] = 1 << 10
        model: nn.Module = DistributedDataParallel(inner, bucket_cap_mb=2**-10)
    else:
        for layer in inner:
            fully_shard(layer)
        model = fully_shard(inner)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    compiled = torch.compile(model, backend=aot_eager(partitioner))
    for x in batches(rank, STEPS):
        compiled(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    local = [getattr(one, "to_local", lambda one=one: one)() for one in model.parameters()]
    return [one.detach().clone() for one in local]


def regions_under_a_budget(rank: int, kind: str) -> dict[str, Any]:
    """Trains without a plan, with one that keeps everything, and under a budget that the largest region exceeds."""
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    with torch._functorch.config.patch(enable_autograd_cache=False):
        plain = trained(rank, kind, None)
        ample = BudgetPartitioner(1 << 40, load_profile(_CARD))
        kept = trained(rank, kind, ample)
        largest = max(ample.regions, key=lambda one: one.inputs_and_outputs_bytes + one.saved_bytes)
        tight = BudgetPartitioner(largest.inputs_and_outputs_bytes + largest.saved_bytes // 2, load_profile(_CARD))
        ours = trained(rank, kind, tight)
    return {
        "equal": [all(map(torch.equal, one, plain)) for one in (kept, ours)],
        "regions": len(tight.regions),
        "peaks": [one.peak_bytes for one in tight.regions],
        "budget": tight.budget_bytes,
        "planned": sum(one.by != "min-cut" or one.offloaded_bytes > 0 for one in tight.regions),
    }
