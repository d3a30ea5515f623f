"""Lightning: its usual lines, and one callback, which logs its report.

python examples/lightning_fit.py                    # on a GPU
python examples/lightning_fit.py --device sim       # on the CPU, over a simulated device
"""

from __future__ import annotations

import argparse
import logging
import sys

import lightning.pytorch as pl
import torch
from torch import nn

from vdnn.integrations.lightning import LightningOffloadCallback


class Classifier(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 10))

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        x, labels = batch
        loss = nn.functional.cross_entropy(self.model(x), labels)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "sim"], default="cuda")
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args()
    logging.basicConfig(level="INFO", format="%(message)s", stream=sys.stdout)
    pl.seed_everything(0, verbose=False)
    data = torch.utils.data.TensorDataset(torch.randn(256, 64), torch.randint(10, (256,)))
    trainer = pl.Trainer(
        accelerator="cuda" if options.device == "cuda" else "cpu",
        max_steps=options.steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        callbacks=[LightningOffloadCallback(device=options.device, min_bytes="4KiB")],
    )
    trainer.fit(Classifier(), torch.utils.data.DataLoader(data, batch_size=64))
    print(f"loss {trainer.callback_metrics['loss']}")


if __name__ == "__main__":
    main()
