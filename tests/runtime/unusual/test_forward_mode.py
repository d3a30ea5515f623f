"""Forward-mode differentiation: zero tangents have no memory, and pass through."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jacfwd, jvp, linearize

from tests.runtime.unusual.every_mode import MODES, Step, assert_same_in

pytestmark = [
    pytest.mark.slow,
    # Torch compiles decompositions when forward mode is first used, and traces what it linearizes.
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning"),
]


def _layers() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4))


def _trained(model: nn.Module, loss_of: Callable[[int], torch.Tensor]) -> Step:
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.05)

    def step(index: int) -> Iterable[torch.Tensor | None]:
        optimizer.zero_grad()
        loss = loss_of(index)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return [loss, *(one.grad for one in parameters), *parameters]

    return step


def _dual_numbers() -> Step:
    """Differentiates a directional derivative."""
    model = _layers()

    def loss_of(index: int) -> torch.Tensor:
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(torch.randn(12, 8) + index, torch.randn(12, 8))
            value, tangent = forward_ad.unpack_dual(model(dual))
            assert tangent is not None
            return value.square().mean() + tangent.square().mean()

    return _trained(model, loss_of)


def _dual_parameters() -> Step:
    """A derivative along a direction of the parameters, some of which have no tangent. Runs no backward."""
    model = _layers()
    names = [name for name, _ in model.named_parameters()]

    def step(index: int) -> Iterable[torch.Tensor | None]:
        with forward_ad.dual_level():
            given = {
                name: forward_ad.make_dual(one, torch.randn_like(one)) if place % 2 else one
                for place, (name, one) in enumerate(model.named_parameters())
            }
            found = functional_call(model, given, (torch.randn(12, 8) * (index + 1),))
            value, tangent = forward_ad.unpack_dual(found)
            assert tangent is not None
        with torch.no_grad():
            for name in names:
                model.get_parameter(name).mul_(0.99)
        return [value, tangent]

    return step


def _jvp() -> Step:
    model = _layers()

    def loss_of(index: int) -> torch.Tensor:
        value, tangent = jvp(lambda x: model(x.exp()), (torch.randn(12, 8) * 0.1 * index,), (torch.randn(12, 8),))
        return value.square().mean() + tangent.square().mean()

    return _trained(model, loss_of)


def _jvp_of_grad() -> Step:
    """The product of a Hessian and a vector, forward over reverse."""
    model = _layers()

    def loss_of(index: int) -> torch.Tensor:
        slope = grad(lambda x: model(x).square().sum())
        value, product = jvp(slope, (torch.randn(12, 8) - index,), (torch.randn(12, 8),))
        return value.square().mean() + product.square().mean() + model(torch.randn(12, 8)).mean()

    return _trained(model, loss_of)


def _jacfwd() -> Step:
    model = _layers()

    def loss_of(index: int) -> torch.Tensor:
        return jacfwd(model)(torch.randn(8) + index).square().mean() + model(torch.randn(12, 8)).exp().mean()

    return _trained(model, loss_of)


def _linearized() -> Step:
    model = _layers()

    def loss_of(index: int) -> torch.Tensor:
        with torch.no_grad():
            value, push = linearize(lambda x: (x * (index + 1)).tanh() * x, torch.randn(12, 8))
            pushed = push(torch.randn(12, 8))
        return model(value + pushed).square().mean()

    return _trained(model, loss_of)


def _zero_tangents() -> Step:
    """In-place operations and views need tangents where there are none: torch makes zero tangents for them."""
    model = _layers()

    def loss_of(index: int) -> torch.Tensor:
        with forward_ad.dual_level():
            x = model(torch.randn(12, 8) + index)
            x = torch.cat([x, forward_ad.make_dual(torch.randn(12, 4), torch.randn(12, 4)) * x], 1)
            x = torch.where(x > 0, x, x.detach()).mul_(x.clone())
            value, tangent = forward_ad.unpack_dual(torch.nn.functional.layer_norm(x, (8,)))
            assert tangent is not None
            return value.square().mean() + (tangent * value).square().mean()

    return _trained(model, loss_of)


PROGRAMS = {
    "dual numbers": _dual_numbers,
    "dual parameters": _dual_parameters,
    "jvp": _jvp,
    "jvp of grad": _jvp_of_grad,
    "jacfwd": _jacfwd,
    "linearize": _linearized,
    "zero tangents": _zero_tangents,
}


@pytest.mark.drawn(of=2)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("program", PROGRAMS)
def test_forward_mode_is_as_in_plain_torch(program: str, mode: str) -> None:
    assert_same_in(mode, PROGRAMS[program])
