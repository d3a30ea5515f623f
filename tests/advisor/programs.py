"""Small trainings with one fault or none, and the advisor's evidence of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from vdnn.advisor.advice import Advice, Kind
from vdnn.advisor.evidence import Evidence
from vdnn.advisor.examination import EXAMINERS
from vdnn.advisor.host_reads import HostReads
from vdnn.advisor.loop_training import LoopTraining
from vdnn.advisor.observation import observe
from vdnn.hardware import HardwareProfile, load_profile

BATCH, WIDTH, CLASSES = 16, 256, 10


def perceptron(layers: int = 3) -> nn.Sequential:
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(layers)]
    return nn.Sequential(*blocks, nn.Linear(WIDTH, CLASSES))


def vectors(samples: int = 4 * BATCH) -> TensorDataset:
    return TensorDataset(torch.randn(samples, WIDTH), torch.randint(CLASSES, (samples,)))


def pictures(samples: int = 4 * BATCH) -> TensorDataset:
    return TensorDataset(torch.randn(samples, 3, 8, 8), torch.randint(CLASSES, (samples,)))


def convolutional(*, bias: bool) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=bias),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, bias=bias),
        nn.BatchNorm2d(8),
        nn.Flatten(),
        nn.Linear(8 * 4 * 4, CLASSES),
    )


def training_of(
    model: nn.Module,
    loader: Iterable[Any] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: Callable[..., object] | None = None,
) -> LoopTraining:
    """Makes a training with plain SGD, which gives the advisor little to report."""
    given = loader if loader is not None else DataLoader(vectors(), batch_size=BATCH)
    chosen = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    return LoopTraining(model, given, chosen, None if step else functional.cross_entropy, step=step)


def evidence_of(
    training: LoopTraining, hardware: str | HardwareProfile = "h100", *, steps: int = 0, budget_bytes: int | None = None
) -> Evidence:
    profile = load_profile(hardware) if isinstance(hardware, str) else hardware
    host_reads = HostReads()
    observed = observe(training, steps, host_reads)
    return Evidence(training, profile, budget_bytes=budget_bytes, observed=observed, host_reads=host_reads)


def found(kind: Kind, evidence: Evidence) -> list[Advice]:
    return EXAMINERS[kind](evidence)
