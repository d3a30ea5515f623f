"""Nested tensors of both layouts pass through. The plain tensors around them are moved."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from tests.runtime.unusual.every_mode import MODES, Step, assert_same_in
from tests.runtime.unusual.small_networks import steps_on
from vdnn.runtime.storage.counters import Kept

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")


def _nested(rows: list[torch.Tensor], layout: torch.layout = torch.strided) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.as_nested_tensor(rows, layout=layout)


def _rows(index: int) -> list[torch.Tensor]:
    return [torch.randn(length, 8) + index for length in (3, 5 + index % 2, 4)]


def _through_layers() -> Step:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))

    def loss_of(index: int) -> torch.Tensor:
        found = torch.nested.to_padded_tensor(model(_nested(_rows(index))), 0.0)
        return found.exp().mean()

    return steps_on(loss_of, model)


def _of_plain_rows() -> Step:
    """The rows before and after the nested tensor are saved as plain tensors."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())

    def loss_of(index: int) -> torch.Tensor:
        nested = _nested([model(row).exp() for row in _rows(index)])
        return sum((row.square().mean() for row in (nested * 2).softmax(-1).unbind()), torch.zeros(()))

    return steps_on(loss_of, model)


def _products() -> Step:
    model = nn.Linear(8, 8)

    def loss_of(index: int) -> torch.Tensor:
        left = model(_nested(_rows(index)))
        scores = torch.matmul(left, left.transpose(-1, -2)).softmax(-1)
        return torch.nested.to_padded_tensor(torch.matmul(scores, left), 0.0).square().mean()

    return steps_on(loss_of, model)


def _as_a_leaf() -> Step:
    model = nn.Linear(8, 8)

    def loss_of(index: int) -> torch.Tensor:
        leaf = _nested(_rows(index)).requires_grad_()
        loss = torch.nested.to_padded_tensor(model(leaf), 1.0).sin().mean()
        (slope,) = torch.autograd.grad(loss, leaf, create_graph=False, retain_graph=True)
        return loss + torch.nested.to_padded_tensor(slope, 0.0).sum()

    return steps_on(loss_of, model)


def _jagged() -> Step:
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def loss_of(index: int) -> torch.Tensor:
        nested = _nested(_rows(index), torch.jagged)
        return torch.nested.to_padded_tensor(model(nested).sin(), 0.0).square().mean()

    return steps_on(loss_of, model)


PROGRAMS = {
    "through layers": _through_layers,
    "of plain rows": _of_plain_rows,
    "products": _products,
    "a leaf": _as_a_leaf,
    "jagged": _jagged,
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("program", PROGRAMS)
def test_nested_tensors_are_as_in_plain_torch(program: str, mode: str) -> None:
    session = assert_same_in(mode, PROGRAMS[program])
    assert session.counters.kept[Kept.SUBCLASS]
