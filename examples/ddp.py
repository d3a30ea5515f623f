"""Data parallel over several processes, whose ranks agree on one plan between two steps.

torchrun --nproc-per-node 2 examples/ddp.py                      # on GPUs
torchrun --nproc-per-node 2 examples/ddp.py --device titan-x     # on the CPU, as if each rank had that card
"""

from __future__ import annotations

import argparse
import contextlib
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import vdnn
from vdnn.integrations.ranks import offload_together


def perceptron(width: int = 32, depth: int = 6) -> nn.Module:
    return nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda, or the name of a card to be simulated on the CPU")
    parser.add_argument("--budget", default="min", help="of each rank: 12GiB, 80%%, min")
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    on_gpu = options.device == "cuda"
    rank = int(os.environ["LOCAL_RANK"])
    place = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(place)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    card: Any = "cuda" if on_gpu else vdnn.VirtualMachine(options.device, fake=False)
    torch.manual_seed(0)
    model = DistributedDataParallel(perceptron().to(place), device_ids=[rank] if on_gpu else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(dist.get_rank())
    with (
        contextlib.nullcontext() if on_gpu else card,
        offload_together(options.budget, device=card, min_bytes="4KiB") as ranks,
    ):
        for _ in range(options.steps):
            loss = model(torch.randn(256, 32, device=place)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            ranks.step()
    print(f"rank {dist.get_rank()}: loss {loss.item():.6f}\n{ranks.session.report()}")
    del model  # ahead of its group: the last holder of a group of gloo may wait for ever for the group's threads
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
