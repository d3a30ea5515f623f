"""Forward-mode differentiation: zero tangents have no memory, and pass through."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jacfwd, jvp, linearize

from tests.runtime.unusual.every_mode import MODES, Step, assert_same_in
from tests.runtime.unusual.small_networks import smooth, steps_on

pytestmark = [
    pytest.mark.slow,
    # Torch compiles decompositions when forward mode is first used, and traces what it linearizes.
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated"),
    pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning"),
]


def _dual_numbers() -> Step:
    """Differentiates a directional derivative."""
    model = smooth()

    def loss_of(index: int) -> torch.Tensor:
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(torch.randn(12, 8) + index, torch.randn(12, 8))
            value, tangent = forward_ad.unpack_dual(model(dual))
            assert tangent is not None
            return value.square().mean() + tangent.square().mean()

    return steps_on(loss_of, model)


def _dual_parameters() -> Step:
    """A derivative along a direction of the parameters, some of which have no tangent. Runs no backward."""
    model = smooth()
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
    model = smooth()

    def loss_of(index: int) -> torch.Tensor:
        value, tangent = jvp(lambda x: model(x.exp()), (torch.randn(12, 8) * 0.1 * index,), (torch.randn(12, 8),))
        return value.square().mean() + tangent.square().mean()

    return steps_on(loss_of, model)


def _jvp_of_grad() -> Step:
    """The product of a Hessian and a vector, forward over reverse."""
    model = smooth()

    def loss_of(index: int) -> torch.Tensor:
        slope = grad(lambda x: model(x).square().sum())
        value, product = jvp(slope, (torch.randn(12, 8) - index,), (torch.randn(12, 8),))
        return value.square().mean() + product.square().mean() + model(torch.randn(12, 8)).mean()

    return steps_on(loss_of, model)


def _jacfwd() -> Step:
    model = smooth()

    def loss_of(index: int) -> torch.Tensor:
        return jacfwd(model)(torch.randn(8) + index).square().mean() + model(torch.randn(12, 8)).exp().mean()

    return steps_on(loss_of, model)


def _linearized() -> Step:
    model = smooth()

    def loss_of(index: int) -> torch.Tensor:
        with torch.no_grad():
            value, push = linearize(lambda x: (x * (index + 1)).tanh() * x, torch.randn(12, 8))
            pushed = push(torch.randn(12, 8))
        return model(value + pushed).square().mean()

    return steps_on(loss_of, model)


def _zero_tangents() -> Step:
    """In-place operations and views need tangents where there are none: torch makes zero tangents for them."""
    model = smooth()

    def loss_of(index: int) -> torch.Tensor:
        with forward_ad.dual_level():
            x = model(torch.randn(12, 8) + index)
            x = torch.cat([x, forward_ad.make_dual(torch.randn(12, 4), torch.randn(12, 4)) * x], 1)
            x = torch.where(x > 0, x, x.detach()).mul_(x.clone())
            value, tangent = forward_ad.unpack_dual(torch.nn.functional.layer_norm(x, (8,)))
            assert tangent is not None
            return value.square().mean() + (tangent * value).square().mean()

    return steps_on(loss_of, model)


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
