"""Tensors that torch.func wraps pass through: they have no memory of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, grad_and_value, hessian, jacfwd, jacrev, stack_module_state, vjp, vmap

import vdnn
from tests.runtime.unusual.every_mode import MODES, Factory, Step, assert_same_in
from tests.runtime.unusual.small_networks import smooth, steps_on

_Parameters = dict[str, torch.Tensor]

# Torch compiles decompositions when forward mode is first used.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated"),
]


def _ensemble() -> Step:
    """Runs several models at once. Their parameters are batched, and the module's own parameters are not used."""
    models = [smooth() for _ in range(3)]
    parameters, buffers = stack_module_state(models)  # type: ignore[arg-type]
    base = smooth()

    def one(given: Any, kept: Any, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = functional_call(base, (given, kept), (x,))
        return found

    def loss_of(index: int) -> torch.Tensor:
        x = torch.randn(12, 8) * (1 + index)
        return vmap(one, in_dims=(0, 0, None))(parameters, buffers, x).square().mean()

    return steps_on(loss_of, *parameters.values())


def _ensemble_without_gradients() -> Step:
    base = smooth()
    state = {name: torch.stack([one.detach()] * 3) for name, one in base.named_parameters()}

    def step(index: int) -> Iterable[torch.Tensor]:
        with torch.no_grad():
            x = torch.randn(12, 8) + index
            return [vmap(lambda given: functional_call(base, given, (x,)))(state)]

    return step


def _batched_inputs() -> Step:
    """Runs a module in vmap over its inputs, between layers outside of vmap. Dropout draws anew for each sample."""
    inner, outer = smooth(), nn.Linear(8, 8)

    def loss_of(index: int) -> torch.Tensor:
        x = outer(torch.randn(12, 8) - index).exp()
        return vmap(lambda row: nn.functional.dropout(inner(row), 0.3), randomness="different")(x).square().mean()

    return steps_on(loss_of, inner, outer)


def _in_a_vmap_in_a_vmap() -> Step:
    weight = nn.Parameter(torch.randn(8, 8))

    def loss_of(index: int) -> torch.Tensor:
        x = torch.randn(4, 6, 8) * (index + 1)
        return vmap(vmap(lambda row: (row @ weight).sigmoid() * row.exp()))(x).square().mean()

    return steps_on(loss_of, weight)


def _per_sample_gradients() -> Step:
    model = smooth()
    parameters = dict(model.named_parameters())

    def loss_of_one(given: _Parameters, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = functional_call(model, given, (x.unsqueeze(0),)).square().sum()
        return found

    def step(index: int) -> Iterable[torch.Tensor]:
        detached = {name: one.detach() for name, one in parameters.items()}
        found = vmap(grad(loss_of_one), in_dims=(None, 0))(detached, torch.randn(6, 8) + index)
        with torch.no_grad():
            for name, one in parameters.items():
                one -= 0.01 * found[name].mean(0)
        return [*found.values(), *parameters.values()]

    return step


def _gradients_in_a_loss() -> Step:
    """A gradient penalty by torch.func, within a loss with an ordinary backward."""
    model = smooth()
    energy = grad_and_value(lambda x: model(x).square().sum())

    def loss_of(index: int) -> torch.Tensor:
        slope, value = energy(torch.randn(12, 8) - index)
        return slope.square().mean() + value.tanh() + model(torch.randn(12, 8)).square().mean()

    return steps_on(loss_of, model)


def _pulled_back_later() -> Step:
    """Calls the function that vjp returns outside of vjp."""
    model = smooth()

    def loss_of(index: int) -> torch.Tensor:
        out, pull_back = vjp(lambda x: model(x).exp(), torch.randn(12, 8) * 0.1 * index)
        (pulled,) = pull_back(torch.ones_like(out))
        return out.square().mean() + pulled.square().mean()

    return steps_on(loss_of, model)


def _curvature(make: Callable[[Callable[..., torch.Tensor]], Callable[..., torch.Tensor]]) -> Factory:
    def factory() -> Step:
        model = smooth()

        def loss_of(index: int) -> torch.Tensor:
            x = torch.randn(8) + 0.1 * index
            found = make(lambda given: model(given).square().sum())(x)
            return found.square().mean() + model(x.expand(12, 8)).exp().mean()

        return steps_on(loss_of, model)

    return factory


def _backward_in_a_vmap() -> Step:
    """The forward is plain. Its saves are used within vmap."""
    model = smooth()

    def loss_of(index: int) -> torch.Tensor:
        x = (torch.randn(6, 8) + index).requires_grad_()
        out = model(x.exp().tanh())
        (slopes,) = torch.autograd.grad(
            out.sum(0), x, torch.eye(4), retain_graph=True, create_graph=True, is_grads_batched=True
        )
        return slopes.square().mean() + out.square().mean()

    return steps_on(loss_of, model)


def _jacobian_in_a_vmap() -> Step:
    model = smooth()

    def loss_of(index: int) -> torch.Tensor:
        found = torch.autograd.functional.jacobian(  # type: ignore[no-untyped-call]
            model, torch.randn(8) * (index + 1), create_graph=True, vectorize=True
        )
        return found.square().mean() + model(torch.randn(12, 8)).exp().mean()

    return steps_on(loss_of, model)


PROGRAMS: dict[str, Factory] = {
    "an ensemble": _ensemble,
    "an ensemble without gradients": _ensemble_without_gradients,
    "batched inputs": _batched_inputs,
    "a backward in vmap": _backward_in_a_vmap,
    "a jacobian in vmap": _jacobian_in_a_vmap,
    "vmap in vmap": _in_a_vmap_in_a_vmap,
    "per-sample gradients": _per_sample_gradients,
    "gradients in a loss": _gradients_in_a_loss,
    "a vjp called later": _pulled_back_later,
    "hessian": _curvature(hessian),
    "jacfwd of jacrev": _curvature(lambda energy: jacfwd(jacrev(energy))),
    "jacrev of jacrev": _curvature(lambda energy: jacrev(jacrev(energy))),
}


@pytest.mark.drawn(of=2)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("program", PROGRAMS)
def test_transformed_functions_are_as_in_plain_torch(program: str, mode: str) -> None:
    assert_same_in(mode, PROGRAMS[program])


def test_functional_call_takes_inference_tensors_where_everything_is_recomputed() -> None:
    """They have no version that a recipe could ask for."""
    layer = nn.Linear(4, 4)
    x = torch.randn(2, 4)
    with vdnn.offload("recompute-all", device="sim", min_bytes=0), torch.inference_mode():
        halved = {name: one * 0.5 for name, one in layer.named_parameters()}
        found = torch.func.functional_call(layer, halved, (x,))
    assert torch.allclose(found, x @ (layer.weight * 0.5).t() + layer.bias * 0.5)
