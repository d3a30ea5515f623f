"""`vdnn plan` of a model whose embedding has sparse gradients: they count with their indices and values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from vdnn.runtime.rehearsal.plan_ahead import plan
from vdnn.runtime.rehearsal.training_ahead import plan_training
from vdnn.runtime.torch_internals.tensor_kinds import storages_of

ROWS, WIDTH, TOKENS = 1000, 64, 8


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(ROWS, WIDTH, sparse=True)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.out(self.embedding(tokens)).relu()
        return found


def embedded(batch: int) -> Any:
    return Embedded(), torch.zeros(batch, TOKENS, dtype=torch.long)


def test_the_bytes_of_a_sparse_tensor_are_those_of_its_indices_and_values() -> None:
    model, tokens = embedded(4)
    model(tokens).sum().backward()
    sparse, dense = model.embedding.weight.grad, model.out.weight.grad
    assert sparse.is_sparse
    assert sum(one.nbytes() for one in storages_of(sparse)) == 4 * TOKENS * (8 + WIDTH * 4)
    assert sum(one.nbytes() for one in storages_of(dense)) == dense.nbytes


@pytest.mark.parametrize("batch", [64])
def test_a_step_and_a_training_with_sparse_gradients_are_planned(batch: int) -> None:
    assert plan(embedded, batch=batch, hardware="rtx-4090", min_bytes=1).planned.fits
    report = plan_training(embedded, batch=batch, hardware="rtx-4090", optimizer="sgd")
    assert report.peak_bytes > 0
