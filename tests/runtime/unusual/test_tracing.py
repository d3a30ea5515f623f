"""Tensors that a tracer follows pass through: a program traced within a session is right for other inputs, too."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call, functionalize
from torch.fx.experimental.proxy_tensor import make_fx

from tests.runtime.unusual.every_mode import MODES, Factory, Step, assert_same_in
from tests.runtime.unusual.small_networks import smooth, steps_on

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated"),
]


def _followed(trace: Callable[..., Any]) -> Factory:
    """Steps 2 and 5 trace a whole step. The traced program computes the gradients from then on."""

    def factory() -> Step:
        model = smooth()
        names = [name for name, _ in model.named_parameters()]
        traced: list[Any] = []

        def gradients(x: torch.Tensor, *parameters: torch.Tensor) -> tuple[torch.Tensor, ...]:
            loss = functional_call(model, dict(zip(names, parameters, strict=True)), (x.exp(),)).square().mean()
            return torch.autograd.grad(loss, parameters)

        def step(index: int) -> Iterable[torch.Tensor | None]:
            parameters = [one.detach().requires_grad_() for one in model.parameters()]
            if index in (2, 5):
                traced[:] = [trace(gradients)(torch.randn(12, 8), *parameters)]
            x = torch.randn(12, 8) * (1 + index)
            found = traced[0](x, *parameters) if traced else gradients(x, *parameters)
            # Beside the traced program, the session moves the saves of an ordinary step.
            model.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            with torch.no_grad():
                for one, gradient in zip(model.parameters(), found, strict=True):
                    one -= 0.1 * gradient
            return [loss, *found, *(one.grad for one in model.parameters()), *model.parameters()]

        return step

    return factory


def _exported() -> Step:
    model = smooth()
    exported: list[nn.Module] = []
    trained = steps_on(lambda index: model(torch.randn(12, 8) + index).square().mean(), model)

    def step(index: int) -> Iterable[torch.Tensor | None]:
        if index in (2, 5):
            exported[:] = [torch.export.export(model, (torch.randn(12, 8),)).module()]
        return [*trained(index), exported[0](torch.ones(12, 8)) if exported else None]

    return step


def _ahead_of_time() -> Step:
    """A joint graph of forward and backward. The saves of its forward are plain tensors at run time."""
    model = smooth()
    names = [name for name, _ in model.named_parameters()]

    def loss_of(x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        given = dict(zip(names, parameters, strict=True))
        loss: torch.Tensor = functional_call(model, given, (x,)).square().mean()
        return loss

    from functorch.compile import aot_function, nop  # imports Dynamo: not while tests are collected

    compiled: list[Any] = []

    def loss_of_step(index: int) -> torch.Tensor:
        if index in (0, 4):
            compiled[:] = [aot_function(loss_of, nop)]
        return compiled[0](torch.randn(12, 8) + index, *model.parameters())  # type: ignore[no-any-return]

    return steps_on(loss_of_step, model)


def _functionalized() -> Step:
    weight = nn.Parameter(torch.randn(8, 8))

    def written(x: torch.Tensor) -> torch.Tensor:
        y = (x @ weight).exp()
        z = y.clone()
        z.mul_(x)
        z[0] = 1
        found: torch.Tensor = z.tanh() * y
        return found

    def step(index: int) -> Iterable[torch.Tensor | None]:
        weight.grad = None
        x = torch.randn(12, 8) * 0.1 * (index + 1)
        found = functionalize(written)(x)
        loss = ((x @ weight).exp() * found).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        return [found, loss, weight.grad]

    return step


PROGRAMS: dict[str, Factory] = {
    "make_fx real": _followed(lambda function: make_fx(function, tracing_mode="real")),
    "make_fx fake": _followed(lambda function: make_fx(function, tracing_mode="fake")),
    "make_fx symbolic": _followed(lambda function: make_fx(function, tracing_mode="symbolic")),
    "make_fx before dispatch": _followed(lambda function: make_fx(function, pre_dispatch=True)),
    "torch.export": _exported,
    "aot_function": _ahead_of_time,
    "functionalize": _functionalized,
}


@pytest.mark.drawn(of=2)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_traced_program_is_as_in_plain_torch(program: str, mode: str) -> None:
    assert_same_in(mode, PROGRAMS[program])
