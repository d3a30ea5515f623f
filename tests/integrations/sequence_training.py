"""Training loops whose sequences are sharded over the ranks: jobs for tests.integrations.ranks, like those of
parallel_training.

Torch's context_parallel dispatches to attention kernels that only CUDA has. The loop here does it as models also do:
each rank attends from its part of a sequence to the gathered keys and values of all ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from tests.integrations.parallel_training import BATCH, STEPS, WIDTH, beside_plain, blocks, parameters_of

TOKENS = 16
HEADS = 2

# torch before 2.13 has only the second name, at which later ones warn.
_NAMES = ("all_gather_single_autograd", "all_gather_tensor_autograd")
_all_gather: Any = next(
    getattr(_functional_collectives, name) for name in _NAMES if hasattr(_functional_collectives, name)
)


def sequences(count: int = STEPS) -> list[torch.Tensor]:
    """The same batches on all ranks."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(BATCH // TOKENS, TOKENS, WIDTH, generator=generator) for _ in range(count)]


def sequence_parallel(rank: int, how: str) -> dict[str, Any]:
    """Tensor parallel, with norms, residual sums and activations sharded over the tokens."""

    def loop(rank: int) -> list[tuple[str, torch.Tensor]]:
        torch.manual_seed(0)
        model = blocks()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        tokens = Shard(1)
        for block in model:
            spread = {
                "norm": SequenceParallel(),
                "up": ColwiseParallel(input_layouts=tokens),
                "down": RowwiseParallel(output_layouts=tokens, use_local_output=False),
            }
            parallelize_module(block, mesh, spread)
        # Activations between the blocks are DTensors.
        parallelize_module(model[0], mesh, PrepareModuleInput(input_layouts=tokens, desired_input_layouts=tokens))
        parallelize_module(model[-1], mesh, PrepareModuleOutput(output_layouts=tokens, desired_output_layouts=tokens))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for x in sequences():
            model(x.chunk(dist.get_world_size(), 1)[rank].contiguous()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return parameters_of(model)

    return beside_plain(rank, how, loop)


class Attention(nn.Module):
    """Attends from this rank's tokens to those of all ranks."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.group = group
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        keys, values = (_all_gather(one(x).contiguous(), 1, self.group) for one in (self.k, self.v))
        q, k, v = (one.unflatten(-1, (HEADS, -1)).transpose(1, 2) for one in (self.q(x), keys, values))
        attended = nn.functional.scaled_dot_product_attention(q, k, v)
        out: torch.Tensor = x + self.out(attended.transpose(1, 2).flatten(-2))
        return out


def gathering_context_parallel(rank: int, how: str) -> dict[str, Any]:
    def loop(rank: int) -> list[tuple[str, torch.Tensor]]:
        torch.manual_seed(0)
        model = nn.Sequential(*[Attention(dist.group.WORLD) for _ in range(3)])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for x in sequences():
            model(x.chunk(dist.get_world_size(), 1)[rank].contiguous()).square().mean().backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()
            optimizer.zero_grad()
        return parameters_of(model)

    return beside_plain(rank, how, loop)


def context_parallel_of_torch(rank: int) -> str:
    """Returns torch's own error message on the CPU, without vdnn."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    q, k, v = (torch.randn(1, HEADS, TOKENS, WIDTH) for _ in range(3))
    try:
        with context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2, 2, 2]):
            nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    except NotImplementedError as error:
        return str(error)
    return ""
