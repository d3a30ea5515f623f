"""Functions of a program that torch.compile compiles, and that step an optimizer or read gradients: a managed step is
not compiled, and has the bits of the step of plain PyTorch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.runtime.training_state.conftest import Manage
from tests.runtime.training_state.loops import OPTIMIZERS, Training, begin, same
from tests.runtime.training_state.ways import options_for, ways
from vdnn.errors import VdnnError

pytestmark = [
    pytest.mark.usefixtures("one_form_of_the_step"),
    # Torch warns of its own code while it compiles.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Guards may run slower on Python 3.13.0:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]
Function = Callable[[Training], Callable[[], Any]]


@pytest.fixture(autouse=True)
def _compiles_afresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def step(training: Training) -> Callable[[], Any]:
    return training.optimizer.step


def step_in_a_function(training: Training) -> Callable[[], Any]:
    return lambda: training.optimizer.step()


def clip_and_step(training: Training) -> Callable[[], Any]:
    def function() -> torch.Tensor:
        norm = torch.nn.utils.clip_grad_norm_(list(training.model.parameters()), 0.1)
        training.optimizer.step()
        return norm

    return function


def norm_of_gradients(training: Training) -> Callable[[], Any]:
    return lambda: sum(one.grad.square().sum() for one in training.model.parameters() if one.grad is not None)


def scaled(training: Training) -> Callable[[], Any]:
    return lambda: [one.grad.mul_(0.5).sum() for one in training.model.parameters() if one.grad is not None]


def trained(function: Function, way: str, manage: Manage | None) -> list[Any]:
    training = begin(OPTIMIZERS["adamw"])
    options = options_for(way, training)

    def train() -> list[Any]:
        called = function(training)
        if manage is not None:  # plain's own is not compiled: Dynamo fuses a step, which rounds otherwise
            called = torch.compile(called, backend="eager")
        for _ in training.steps(4):
            training.loss().backward()
            training.found.append(called())
            if function in (norm_of_gradients, scaled):
                training.optimizer.step()
        return [*training.found, *(one.detach().clone() for one in training.model.parameters())]

    if manage is None:
        return train()
    with manage(training.optimizer, **options):
        return train()


@ways
@pytest.mark.parametrize("function", [step, step_in_a_function, clip_and_step, norm_of_gradients, scaled])
def test_a_compiled_function_has_the_bits_of_plain_pytorch(function: Function, way: str, manage: Manage) -> None:
    assert same(trained(function, way, None), trained(function, way, manage))


@pytest.mark.filterwarnings(
    "ignore:Using `torch.compile:UserWarning"
)  # global hooks are called for the wrapper as well
def test_a_compiled_wrapper_of_the_model_is_refused_at_its_call(manage: Manage) -> None:
    training = begin(OPTIMIZERS["adamw"])
    wrapper = torch.compile(training.model, backend="eager")
    with manage(training.optimizer, model=training.model, parameters="all"):
        training.loss().backward()
        with pytest.raises(VdnnError, match=r"'model' is compiled, .* Leave out parameters="):
            wrapper(torch.randn(6, 8))
        training.loss().backward()


def test_a_compiled_part_without_managed_parameters_runs(manage: Manage) -> None:
    """Such as a loss, or a teacher, inside of a module that has the model as well."""

    def losses(inside: Any, backend: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model, teacher = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8).requires_grad_(False)
        optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), list[torch.Tensor]()
        both = torch.nn.ModuleDict({"model": model, "teacher": teacher})
        both.forward = lambda x: (model(x) - teacher(x)).square().mean()  # type: ignore[method-assign]
        if backend:
            teacher.compile(backend=backend)
        with inside(optimizer, model):
            for _ in range(3):
                loss = both(torch.randn(4, 8))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                found.append(loss.detach())
        return found

    plain = losses(lambda *_: contextlib.nullcontext(), "")
    assert same(plain, losses(lambda optimizer, model: manage(optimizer, model=model, parameters="all"), "eager"))
