"""Functions for tests to pass to `vdnn advise`: valid ones and invalid ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

from tests.advisor.programs import BATCH, WIDTH, perceptron, vectors


def loop() -> tuple[Any, ...]:
    model = perceptron()
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    return model, DataLoader(vectors(), batch_size=BATCH), optimizer, nn.CrossEntropyLoss()


def with_step() -> SimpleNamespace:
    model, loader, optimizer, _ = loop()
    return SimpleNamespace(model=model, loader=loader, optimizer=optimizer, step=reading_step)


def reading_step(model: Any, optimizer: Any, batch: Any) -> None:
    loss = functional.cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    loss.item()


def workload(batch: int) -> tuple[nn.Module, torch.Tensor]:
    return perceptron(), torch.randn(batch, WIDTH)


def of_other_widths() -> tuple[Any, ...]:
    _, loader, _, loss = loop()
    model = nn.Sequential(nn.Linear(WIDTH + 1, 2))
    return model, loader, torch.optim.SGD(model.parameters()), loss


class _Fails:
    def __getitem__(self, index: int) -> Any:
        raise KeyError("label")

    def __len__(self) -> int:
        return 4


class _CannotBegin(DataLoader[Any]):
    def __iter__(self) -> Any:
        raise FileNotFoundError("no data here")


def with_a_loader_that_fails() -> tuple[Any, ...]:
    model, _, optimizer, loss = loop()
    return model, DataLoader(_Fails(), batch_size=2), optimizer, loss  # type: ignore[arg-type]


def with_a_loader_that_cannot_begin() -> tuple[Any, ...]:
    model, _, optimizer, loss = loop()
    return model, _CannotBegin(vectors(), batch_size=BATCH), optimizer, loss


def empty() -> tuple[Any, ...]:
    model, _, optimizer, loss = loop()
    return model, DataLoader(vectors(BATCH), batch_size=2 * BATCH, drop_last=True), optimizer, loss


def no_parts() -> str:
    return "nothing"


def interrupted() -> None:
    raise KeyboardInterrupt
