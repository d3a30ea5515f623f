"""torch.func, make_fx and torch.jit.trace inside a session that manages parameters: bits as plain, and a report of what
stays."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import vdnn
from tests.runtime.training_state.conftest import Manage

STEPS, BEGINS = 4, 2
MakesValue = Callable[[nn.Module, Tensor], Tensor]

# Torch compiles decompositions when forward mode is first used.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.(script|trace(_method)?)` is deprecated")


class Derivative(nn.Module):
    """Takes the derivative of a part of itself in its forward, as networks of energies and forces do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 1)
        self.differentiates = False

    def energy(self, x: Tensor) -> Tensor:
        energy: Tensor = self.second(torch.tanh(self.first(x))).sum()
        return energy

    def forward(self, x: Tensor) -> Tensor:
        return grad(self.energy)(x) if self.differentiates else self.energy(x)


def of_the_input(model: nn.Module, x: Tensor) -> Tensor:
    return grad(lambda given: model(given).sum())(x)


def jacobian(model: nn.Module, x: Tensor) -> Tensor:
    found: Tensor = jacrev(model)(x)
    return found


def second_derivative(model: nn.Module, x: Tensor) -> Tensor:
    found: Tensor = hessian(lambda given: model(given).sum())(x[0])
    return found


def of_the_parameters(model: nn.Module, x: Tensor) -> Tensor:
    def loss(given: Any) -> Tensor:
        return functional_call(model, given, (x,)).square().mean()

    return torch.cat([one.flatten() for one in grad(loss)(dict(model.named_parameters())).values()])


def of_each_sample(model: nn.Module, x: Tensor) -> Tensor:
    def loss(given: Any, row: Tensor) -> Tensor:
        return functional_call(model, given, (row,)).square().mean()

    given = dict(model.named_parameters())
    return torch.cat([one.flatten(1) for one in vmap(grad(loss), in_dims=(None, 0))(given, x).values()], 1)


def pulled_back(model: nn.Module, x: Tensor) -> Tensor:
    out, back = vjp(model, x)
    found: Tensor = back(torch.ones_like(out))[0]
    return found


def trained_through(model: nn.Module, x: Tensor) -> Tensor:
    """The graph outlives the transform: its gradients are added to those of the step."""
    found = of_the_input(model, x.requires_grad_())
    found.square().sum().backward()
    return found


def traced(model: nn.Module, x: Tensor) -> Tensor:
    def gradients(given: Tensor) -> list[Tensor]:
        given = given.detach().requires_grad_()
        return list(torch.autograd.grad(model(given).square().sum(), [given]))

    found: Tensor = make_fx(gradients)(x)(x)[0]
    return found


def jit_traced(model: nn.Module, x: Tensor) -> Tensor:
    """Calls the traced model twice."""
    with torch.no_grad():
        made: Any = torch.jit.trace(model, x, check_trace=False)
        return torch.stack([made(x), made(2 * x)])


def in_its_forward(model: nn.Module, x: Tensor) -> Tensor:
    model.differentiates = True  # type: ignore[assignment]
    found: Tensor = model(x)
    model.differentiates = False  # type: ignore[assignment]
    found.square().sum().backward()
    return found


def forward_mode(model: nn.Module, x: Tensor) -> Tensor:
    found: Tensor = jacfwd(model)(x)
    return found


def by_rows(model: nn.Module, x: Tensor) -> Tensor:
    out = vmap(model)(x)
    out.square().sum().backward()
    return out


VALUES: list[MakesValue] = [
    of_the_input,
    jacobian,
    second_derivative,
    of_the_parameters,
    of_each_sample,
    pulled_back,
    trained_through,
    traced,
    in_its_forward,
    jit_traced,
]


def trained(
    value: MakesValue, parameters: str | None, manage: Manage | None = None, begins: int = BEGINS
) -> tuple[list[Tensor], str]:
    """A training that takes a derivative from this step on, and the session's report. One layer is frozen."""
    torch.manual_seed(0)
    model = Derivative()
    model.first.requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    session: Any = contextlib.nullcontext()
    if manage is not None:
        session = manage(optimizer if parameters == "all" else None, model=model, parameters=parameters)
    found, report = list[Tensor](), ""
    with session as entered:
        for step in range(STEPS):
            torch.manual_seed(step)
            x = torch.randn(5, 6)
            loss = model(x).square()
            if step >= begins:
                found.append(value(model, x.clone()).detach().clone())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach().clone())
        if manage is not None:
            report = entered.report()
    return [*found, *(one.detach().clone() for one in model.parameters())], report


@pytest.mark.parametrize("begins", [0, BEGINS])  # the first uses of a parameter are checked on the device
@pytest.mark.parametrize("parameters", ["all", "frozen"])
@pytest.mark.parametrize("value", [forward_mode, by_rows])
def test_a_transform_without_backward_streams_parameters_as_before(
    value: MakesValue, parameters: str, begins: int, manage: Manage
) -> None:
    plain, _ = trained(value, None, begins=begins)
    ours, report = trained(value, parameters, manage, begins)
    assert len(ours) == len(plain)
    assert all(map(torch.equal, ours, plain))
    assert "stays on the device" not in report


@pytest.mark.parametrize("parameters", ["all", "frozen"])
@pytest.mark.parametrize("value", VALUES)
def test_a_transform_over_managed_parameters_has_the_bits_of_plain(
    value: MakesValue, parameters: str, manage: Manage
) -> None:
    plain, _ = trained(value, None)
    ours, report = trained(value, parameters, manage)
    assert len(ours) == len(plain)
    assert all(map(torch.equal, ours, plain))
    by = {traced: "make_fx", jit_traced: "torch.jit.trace"}.get(value, "torch.func")
    assert f"parameter first.weight stays on the device: {by} ran inside the session" in report


@pytest.mark.parametrize("parameters", ["all", "frozen"])
@pytest.mark.parametrize("value", [of_the_input, traced, jit_traced])
def test_a_transform_is_refused_while_the_program_holds_memory_that_would_see_no_later_step(
    value: MakesValue, parameters: str, manage: Manage
) -> None:
    torch.manual_seed(0)
    model = Derivative()
    model.first.requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with manage(optimizer if parameters == "all" else None, model=model, parameters=parameters) as session:
        model(torch.randn(5, 6)).backward()
        optimizer.step()
        held = model.first.weight.detach()
        with pytest.raises(vdnn.VdnnError, match=r"first.weight .* would see no later step"):
            value(model, torch.randn(5, 6))
        assert "stays on the device" not in session.report()
        with torch.no_grad():
            model.first.weight.mul_(0.5)
        assert torch.equal(held, model.first.weight)
        del held
        value(model, torch.randn(5, 6))
        assert "parameter first.weight stays on the device" in session.report()


@pytest.mark.parametrize("calls_before", [0, 1, 2])
def test_functions_run_once_behind_a_transform_that_let_all_parameters_stay(calls_before: int, manage: Manage) -> None:
    """Batch norms count batches, and dropout draws numbers, in each run."""

    def ran(manages: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session: Any = manage(optimizer, model=model, parameters="all") if manages else contextlib.nullcontext()
        with session:
            for step in range(4):
                x = torch.randn(5, 6)
                if step == calls_before:
                    grad(lambda given, x=x: nn.functional.linear(x, given).square().sum())(model[0].weight)
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return [*model.state_dict().values(), torch.get_rng_state()]

    assert all(map(torch.equal, ran(manages=False), ran(manages=True)))


def test_hooks_of_others_inside_the_session_are_refused_as_in_plain(manage: Manage) -> None:
    model = Derivative()
    others = torch.autograd.graph.saved_tensors_hooks(lambda one: one, lambda one: one)
    with manage(None, model=model.requires_grad_(False), parameters="frozen"):  # noqa: SIM117
        with others, pytest.raises(RuntimeError, match="don't yet support saved tensor hooks"):
            of_the_input(model, torch.randn(2, 6))
