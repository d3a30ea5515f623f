"""Torch takes or refuses, as in plain PyTorch, each value that a program writes to `parameter.grad`."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import vdnn
from tests.runtime.training_state.conftest import Manage, open_session
from tests.runtime.training_state.loops import Training, same
from tests.runtime.training_state.programs import check, every_way
from tests.runtime.training_state.ways import WAYS
from vdnn import _C

# A value for `parameter.grad` that torch refuses.
REFUSED: dict[str, Callable[[torch.Tensor], Any]] = {
    "a number": lambda parameter: 3,
    "a list": lambda parameter: [1.0],
    "an array": lambda parameter: parameter.detach().numpy(),
    "a text": lambda parameter: "gradient",
    "another shape": lambda parameter: torch.zeros(3, 5, 7),
    "another dtype": lambda parameter: torch.zeros_like(parameter, dtype=torch.float64),
    "another device": lambda parameter: torch.zeros_like(parameter, device="meta"),
    "itself": lambda parameter: parameter,
}


@every_way
@pytest.mark.parametrize("value", REFUSED)
def test_a_value_that_torch_refuses_raises_its_error_and_the_gradient_stays(
    value: str, way: str, manage: Manage
) -> None:
    def program(training: Training) -> Iterator[None]:
        parameters = list(training.model.parameters())

        def assign() -> None:
            for one in parameters[::2]:
                try:
                    one.grad = REFUSED[value](one)
                except (TypeError, RuntimeError) as error:
                    training.found.append(f"{type(error).__name__}: {error}")

        yield
        for _ in range(2):
            assign()
            training.loss().backward()
            assign()
            training.loss().backward()
            training.optimizer.step()
            assign()  # behind a step that may wait
        training.found.append(len(training.found) >= 30)

    check(program, way, manage)


@every_way
def test_gradients_that_are_written_swapped_and_deleted_are_those_of_the_step(way: str, manage: Manage) -> None:
    def program(training: Training) -> Iterator[None]:
        model: Any = training.model
        yield
        for _ in range(3):
            training.loss().backward()
            one, other = model.between, model.last
            one.weight.grad, other.weight.grad = other.weight.grad, one.weight.grad
            one.bias.grad = other.bias.grad
            del model.normal.bias.grad
            model.head.weight.grad.data.mul_(2)
            model.head.bias.grad = nn.Parameter(torch.ones_like(model.head.bias))
            training.loss().backward()
            training.found += [one.bias.grad is other.bias.grad, model.head.bias.grad.requires_grad]
            training.optimizer.step()
            model.inner.weight.grad = model.inner.weight.grad * 0.5
            training.loss().backward()
            training.optimizer.step()
            training.optimizer.zero_grad(set_to_none=False)

    check(program, way, manage)


class Conjugated(torch.autograd.Function):
    """Its gradient has the conjugate bit: its bytes are not its values."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return weight.real.square().sum() + 2 * weight.imag.square().sum()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (weight,) = ctx.saved_tensors
        return (gradient * torch.complex(weight.real, -2 * weight.imag)).conj()


class Negated(torch.autograd.Function):
    """Its gradient has the negative bit."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return -weight.square().sum() / 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (weight,) = ctx.saved_tensors
        whole = torch.complex(torch.zeros_like(weight), gradient * weight)
        return whole.conj().imag


@pytest.mark.parametrize("way", ["gradients", "deferred", "deferred, gradients", None])
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW], ids=lambda make: make.__name__)
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("function", [Conjugated, Negated], ids=lambda function: function.__name__)
def test_a_gradient_with_lazy_bits_is_stepped_or_refused_as_in_plain_pytorch(
    function: Any, micro_batches: int, make: Any, way: str | None, manage: Manage
) -> None:
    def train(is_managed: bool) -> Any:
        torch.manual_seed(3)
        dtype = torch.complex64 if function is Conjugated else torch.float32
        weights = [nn.Parameter(torch.randn(5, dtype=dtype)) for _ in range(3)]
        optimizer = make(weights, lr=0.1)
        found: list[Any] = []
        try:
            if not is_managed:
                loop(weights, optimizer, found)
            else:
                with manage(optimizer, policy="keep", **WAYS.get(way or "", {})):
                    loop(weights, optimizer, found)
                    optimizer.state_dict()
        except (RuntimeError, vdnn.VdnnError) as error:
            found.append("view_as_real doesn't work on unresolved conjugated tensors" in str(error))
        return [*found, *(one.detach().clone() for one in weights)]

    def loop(weights: Any, optimizer: Any, found: list[Any]) -> None:
        for _ in range(3):
            for _ in range(micro_batches):
                sum(function.apply(one) for one in weights).backward()
            found += [one.grad.resolve_conj().resolve_neg().clone() for one in weights]
            optimizer.step()
            optimizer.zero_grad()

    expected, found = train(False), train(True)
    assert len(expected) == len(found)
    assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(expected, found, strict=True))


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("make", [torch.optim.SparseAdam, torch.optim.SGD, torch.optim.Adagrad])
def test_sparse_gradients_and_a_step_on_the_cpu_are_refused_in_one_sentence_before_anything_is_stepped(
    make: Any, device: _C.Device
) -> None:
    table, dense = nn.Embedding(50, 4, sparse=True), nn.Embedding(50, 4)
    parameters = [table.weight] if make is torch.optim.SparseAdam else [dense.weight, table.weight]
    optimizer = make(parameters, lr=0.1)
    rows = torch.tensor([1, 3, 3])
    before = [one.detach().clone() for one in parameters]
    with open_session(device, optimizer, optimizer_on="cpu", policy="keep") as session:
        (table(rows) + dense(rows)).sum().backward()
        with pytest.raises(vdnn.VdnnError, match="gradient of parameter .* is sparse.*optimizer_on='device'") as raised:
            optimizer.step()
        assert str(raised.value).count("\n") == 0
        assert all(map(torch.equal, before, parameters))
    session.close()
    optimizer.step()
    assert not any(map(torch.equal, before, parameters))


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("make", [torch.optim.SparseAdam, torch.optim.Adagrad, torch.optim.SGD])
@pytest.mark.parametrize("way", ["state", "gradients", "deferred", "deferred, gradients"])
def test_sparse_gradients_sum_and_step_as_in_plain_pytorch(way: str, make: Any, manage: Manage) -> None:
    def train(inside: Any) -> list[Any]:
        torch.manual_seed(2)
        table, dense = nn.Embedding(50, 4, sparse=True), nn.Linear(4, 4)
        optimizer = make(table.parameters(), lr=0.1)
        with inside(optimizer):
            for number in range(4):
                for shift in range(2):
                    dense(table(torch.tensor([1, 3, 3, 7 + number + shift]))).square().sum().backward()
                optimizer.step()
                if number % 2:
                    optimizer.zero_grad()
            state = copy.deepcopy(optimizer.state_dict())
        gradient = table.weight.grad
        return [table.weight.detach(), state, gradient if gradient is None else gradient.to_dense()]

    expected = train(lambda _: contextlib.nullcontext())
    assert same(expected, train(lambda optimizer: manage(optimizer, **WAYS[way])))


@every_way
def test_a_gradient_that_is_read_in_inference_mode_is_an_ordinary_tensor(way: str, manage: Manage) -> None:
    """The norm is logged there, and the next micro-batch and clipping write to the same tensor."""

    def program(training: Training) -> Iterator[None]:
        yield
        for step in range(3):
            for _ in range(3):
                training.loss().backward()
                with torch.inference_mode():
                    gradients = [one.grad for one in training.model.parameters()]
                    training.found += [one.norm().clone() for one in gradients if one is not None]
                del gradients
            nn.utils.clip_grad_norm_(training.model.parameters(), 0.01)
            training.optimizer.step()
            training.optimizer.zero_grad(set_to_none=step == 1)

    check(program, way, manage)
