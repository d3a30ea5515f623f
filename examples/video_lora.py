"""LoRA on a diffusion transformer whose frozen weights live on the host: images or clips on a card of 8 to 24 GiB.

python examples/video_lora.py                    # on a GPU
python examples/video_lora.py --device titan-x   # on the CPU, as if it were that card

For a network of diffusers put `FluxTransformer2DModel.from_pretrained(...)` in place of `ClipTransformer`, and name its
projections in `target_modules`. `flux` has its whole size, to be planned without a GPU and without weights:

vdnn plan examples/video_lora.py:flux --batch 1 --training --optimizer adamw --hardware rtx-4090 --host 64GiB
"""

from __future__ import annotations

import argparse
import contextlib
from typing import Any

import peft
import torch
from torch import Tensor, nn
from torch.nn import functional

import vdnn


class Block(nn.Module):
    """Attention and a perceptron, both scaled, shifted and gated by the noise level, as in DiT."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.modulation = nn.Linear(width, 6 * width)
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(width, width) for _ in range(4))
        self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift, scale, gate, shift_2, scale_2, gate_2 = self.modulation(condition)[:, None].chunk(6, -1)
        normed = functional.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift
        query, key, value = (
            made(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2) for made in (self.to_q, self.to_k, self.to_v)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        x = x + gate * self.to_out(mixed)
        normed = functional.layer_norm(x, x.shape[-1:]) * (1 + scale_2) + shift_2
        return x + gate_2 * self.perceptron(normed)  # type: ignore[no-any-return]


class ClipTransformer(nn.Module):
    """Predicts the velocity of latents [batch, channels, frames, height, width] at a noise level between 0 and 1."""

    def __init__(self, channels: int = 4, width: int = 64, depth: int = 4, patch: int = 2) -> None:
        super().__init__()
        self.patches = nn.Conv3d(channels, width, (1, patch, patch), (1, patch, patch))
        self.level = nn.Sequential(nn.Linear(1, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList([Block(width) for _ in range(depth)])
        self.back = nn.ConvTranspose3d(width, channels, (1, patch, patch), (1, patch, patch))

    def forward(self, latents: Tensor, level: Tensor) -> Tensor:
        patches = self.patches(latents)
        x, condition = patches.flatten(2).transpose(1, 2), self.level(level[:, None])
        for block in self.blocks:
            x = block(x, condition)
        return self.back(x.transpose(1, 2).unflatten(2, patches.shape[2:]))  # type: ignore[no-any-return]


def flux(batch: int) -> Any:
    """Flux with 12 billion parameters in bfloat16 and LoRA, on images of 1024 x 1024 and texts of 512 tokens."""
    from diffusers import FluxTransformer2DModel

    base = FluxTransformer2DModel(guidance_embeds=True).to(torch.bfloat16)
    model = peft.get_peft_model(base, peft.LoraConfig(r=16, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
    inputs = {
        "hidden_states": torch.randn(batch, 4096, 64, dtype=torch.bfloat16),
        "encoder_hidden_states": torch.randn(batch, 512, 4096, dtype=torch.bfloat16),
        "pooled_projections": torch.randn(batch, 768, dtype=torch.bfloat16),
        "timestep": torch.rand(batch, dtype=torch.bfloat16),
        "guidance": torch.ones(batch, dtype=torch.bfloat16),
        "img_ids": torch.zeros(4096, 3),
        "txt_ids": torch.zeros(512, 3),
    }
    return model, inputs, lambda output: output[0].float().square().mean()


def train(options: argparse.Namespace) -> nn.Module:
    on_gpu = options.device == "cuda"
    place = "cuda" if on_gpu else "cpu"
    card: Any = "cuda" if on_gpu else vdnn.VirtualMachine(options.device, fake=False)
    with contextlib.nullcontext() if on_gpu else card:
        torch.manual_seed(0)
        adapters = peft.LoraConfig(r=8, target_modules=["to_q", "to_k", "to_v", "to_out"])
        model = peft.get_peft_model(ClipTransformer(), adapters).to(place)  # type: ignore[arg-type]
        optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-3)
        with vdnn.offload(
            budget=options.budget, device=card, min_bytes="4KiB", model=model, parameters="frozen"
        ) as session:
            for step in range(options.steps):
                frames = (1, 4, 8)[step % 3]  # images and clips take turns
                clean = torch.randn(2, 4, frames, 16, 16, device=place)
                noise, level = torch.randn_like(clean), torch.rand(2, device=place)
                noisy = torch.lerp(clean, noise, level[:, None, None, None, None])
                loss = functional.mse_loss(model(noisy, level), noise - clean)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                print(f"step {step}: {frames} frames, loss {loss.item():.4f}")
        print(session.report())
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda, or the name of a card to be simulated on the CPU")
    parser.add_argument("--budget", default="80%", help="12GiB, 80%%, min")
    parser.add_argument("--steps", type=int, default=9)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
