"""Fits of a small model by Lightning's Trainer, plainly and with a callback. Importing this takes three seconds: tests
import it when they run, and not when they are collected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import torch

from tests.integrations.parallel_training import BATCH, WIDTH, blocks
from vdnn.integrations.lightning import LightningOffloadCallback

STEPS = 6
Values = list[torch.Tensor]


class Regression(lightning.LightningModule):  # type: ignore[misc,unused-ignore]
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = blocks()

    def training_step(self, x: torch.Tensor, index: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(x).square().mean()
        return loss

    validation_step = training_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def loader() -> Any:
    rows: Any = torch.randn(12 * BATCH, WIDTH)
    return torch.utils.data.DataLoader(rows, batch_size=BATCH)


def quiet(folder: Path, **options: Any) -> dict[str, Any]:
    silent = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return {**silent, "enable_model_summary": False, "accelerator": "cpu", "default_root_dir": folder, **options}


def fit_plainly(module: Any, **options: Any) -> Values:
    torch.manual_seed(7)
    trainer = lightning.Trainer(max_steps=STEPS, **options)
    trainer.fit(module, loader(), loader())
    return [value.detach().clone() for value in module.state_dict().values()]


def fit_with(callback: LightningOffloadCallback, module: Any, **options: Any) -> Values:
    torch.manual_seed(7)
    trainer = lightning.Trainer(max_steps=STEPS, **options)
    trainer.callbacks.append(callback)
    trainer.fit(module, loader(), loader())
    return [value.detach().clone() for value in module.state_dict().values()]
