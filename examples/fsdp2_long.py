"""Full fine-tuning of long texts with FSDP2: parameters are sharded, and each rank's activations fit a budget.

torchrun --nproc-per-node 2 examples/fsdp2_long.py --tokens 32768                 # on GPUs
torchrun --nproc-per-node 2 examples/fsdp2_long.py --device h100 --tokens 256     # on the CPU, as if on that card
"""

from __future__ import annotations

import argparse
import contextlib
import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import vdnn
from vdnn.integrations.ranks import offload_together

WORDS = 256


def decoder() -> LlamaForCausalLM:
    sizes = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 4, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, pad_token_id=0, **sizes))


def train(options: argparse.Namespace) -> torch.nn.Module:
    on_gpu = options.device == "cuda"
    place = "cuda" if on_gpu else "cpu"
    card: Any = "cuda" if on_gpu else vdnn.VirtualMachine(options.device, fake=False)
    mesh = init_device_mesh(place, (dist.get_world_size(),))
    with contextlib.nullcontext() if on_gpu else card:
        torch.manual_seed(0)
        model: Any = decoder().to(place)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        torch.manual_seed(dist.get_rank())
        with offload_together(options.budget, device=card, min_bytes="4KiB") as ranks:
            for step in range(options.steps):
                tokens = torch.randint(WORDS, (1, options.tokens), device=place)
                loss = model(input_ids=tokens, labels=tokens).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                ranks.step()
                print(f"rank {dist.get_rank()}, step {step}: loss {loss.item():.4f}")
        print(ranks.session.report())
    return model  # type: ignore[no-any-return]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda, or the name of a card to be simulated on the CPU")
    parser.add_argument("--budget", default="min", help="of each rank: 40GiB, 80%%, min")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    if options.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    train(options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
