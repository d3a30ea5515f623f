"""Parameters and buffers whose forward gives them other memory (`self.u.data = ...`), as implementations of spectral
normalization do. Autograd saves the tensor itself, so a backward behind two forwards reads the memory of the last one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.runtime.unusual.every_mode import MODES, Step, assert_same_in

Tensor = torch.Tensor


class Iterated(nn.Module):
    """One step of a power iteration in each forward."""

    def __init__(self, vector: Callable[[nn.Module], None]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(48, 48))
        vector(self)

    def forward(self, x: Tensor) -> Tensor:
        u: Any = self.u
        iterated = functional.normalize(self.weight.detach().mv(u.detach()), dim=0)
        u.data = iterated
        return x @ (self.weight / u.dot(self.weight.mv(u)))


def as_parameter(module: nn.Module) -> None:
    module.u = nn.Parameter(torch.randn(48), requires_grad=False)


def as_buffer(module: nn.Module) -> None:
    module.register_buffer("u", torch.randn(48))


def as_parameter_of_a_child(module: nn.Module) -> None:
    """The parent's forward, which replaces it, is not a forward of the module that has it."""
    child = nn.Module()
    as_parameter(child)
    module.child = child
    type(module).u = property(lambda self: self.child.u)  # type: ignore[attr-defined]


class IteratedByParent(Iterated):
    pass


def forwards(calls: int, model: Callable[[], nn.Module]) -> Callable[[], Step]:
    def factory() -> Step:
        net = model()
        optimizer = torch.optim.SGD([one for one in net.parameters() if one.requires_grad], lr=0.01)

        def step(_: int) -> list[Tensor | None]:
            optimizer.zero_grad()
            loss = torch.stack([net(torch.randn(16, 48)).tanh().square().mean() for _ in range(calls)]).sum()
            loss.backward()
            optimizer.step()
            return [loss, *(one.grad for one in net.parameters()), *(one.clone() for one in net.state_dict().values())]

        return step

    return factory


VECTORS = {
    "a parameter": lambda: Iterated(as_parameter),
    "a buffer": lambda: Iterated(as_buffer),
    "a parameter of a child": lambda: IteratedByParent(as_parameter_of_a_child),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("vector", VECTORS)
def test_a_vector_that_each_forward_replaces_is_the_last_one_in_backward(vector: str, mode: str) -> None:
    assert_same_in(mode, forwards(2, VECTORS[vector]))
