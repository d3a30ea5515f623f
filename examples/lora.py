"""LoRA by PEFT in a loop of one's own: frozen weights stay where they are, activations leave.

python examples/lora.py                    # on a GPU
python examples/lora.py --device sim       # on the CPU, over a simulated device
"""

from __future__ import annotations

import argparse

import peft
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import vdnn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "sim"], default="cuda")
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args()
    place = "cuda" if options.device == "cuda" else "cpu"
    torch.manual_seed(0)
    base = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_embd=64, n_layer=2, n_head=4, n_positions=64))
    adapters = peft.LoraConfig(r=8, target_modules=["c_attn"], fan_in_fan_out=True)
    model = peft.get_peft_model(base, adapters).to(place)
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-3)
    with vdnn.offload(device=options.device, min_bytes="4KiB") as session:
        for step in range(options.steps):
            tokens = torch.randint(0, 256, (4, 32), device=place)
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(f"step {step}: loss {loss.item():.4f}")
    print(session.report())


if __name__ == "__main__":
    main()
