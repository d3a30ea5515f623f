"""A ResNet in a loop of one's own: the loop, and one line more.

python examples/resnet_loop.py                    # on a GPU
python examples/resnet_loop.py --device sim       # on the CPU, over a simulated device
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

import vdnn


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.inner(x))


def resnet(channels: int = 16, depth: int = 3) -> nn.Module:
    stem = nn.Conv2d(3, channels, 3, padding=1)
    blocks = [Residual(channels) for _ in range(depth)]
    return nn.Sequential(stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "sim"], default="cuda")
    parser.add_argument("--budget", default=None, help="12GiB, 80%%, min; only where there is a clock: not with sim")
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args()
    place = "cuda" if options.device == "cuda" else "cpu"
    torch.manual_seed(0)
    model = resnet().to(place)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    with vdnn.offload(device=options.device, budget=options.budget, min_bytes="4KiB") as session:
        for step in range(options.steps):
            images = torch.randn(8, 3, 32, 32, device=place)
            labels = torch.randint(10, (8,), device=place)
            loss = criterion(model(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(f"step {step}: loss {loss.item():.4f}")
    print(session.report())


if __name__ == "__main__":
    main()
