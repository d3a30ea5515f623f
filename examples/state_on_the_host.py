"""A full fine-tune whose optimizer's state lives on the host: clipping, accumulation and a schedule as they are.

python examples/state_on_the_host.py                 # on a GPU
python examples/state_on_the_host.py --device sim    # on the CPU, over a simulated device
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

import vdnn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "sim"], default="cuda")
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args()
    place = "cuda" if options.device == "cuda" else "cpu"
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(128, 128), nn.GELU()) for _ in range(4)]
    model = nn.Sequential(*layers).to(place)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
    with vdnn.offload(device=options.device, min_bytes="4KiB", model=model, optimizer=optimizer) as session:
        for step in range(options.steps):
            for _ in range(2):
                loss = model(torch.randn(64, 128, device=place)).square().mean() / 2
                loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            print(f"step {step}: loss {loss.item():.4f}")
    print(session.report())


if __name__ == "__main__":
    main()
