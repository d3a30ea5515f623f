"""Trained parameters from the begin of a session to after its end, what a program does to them, and what fails."""

from __future__ import annotations

import contextlib
import copy
import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import vdnn
from tests.runtime.training_state.conftest import Manage
from tests.runtime.training_state.loops import OPTIMIZERS, Training, begin, same
from tests.runtime.training_state.test_lives import one_step
from vdnn.errors import VdnnError
from vdnn.runtime.training_state.parameters.away_parameter import away_of

ADAMW = OPTIMIZERS["adamw"]
OUT_OF_MEMORY, INVALID_VALUE = 2, 1


def values(training: Training) -> list[torch.Tensor]:
    return [one.detach().clone() for one in training.model.parameters()]


def are_on_host(training: Training) -> list[bool]:
    known = [away_of(one) for one in training.model.parameters()]
    return [away is not None and away.parameter.data_ptr() == away.host.tensor.data_ptr() for away in known]


def test_copies_parametrizations_and_functional_calls_have_the_bits(manage: Manage) -> None:
    def run(training: Training, inside: Any) -> list[Any]:
        nn.utils.parametrizations.weight_norm(training.model.get_submodule("between"))
        nn.utils.parametrizations.spectral_norm(training.model.get_submodule("last"))
        training.optimizer = ADAMW(training.model.parameters())
        found: list[Any] = []
        with inside(training):
            for _ in range(4):
                one_step(training)
                copied = copy.deepcopy(training.model)
                x = torch.ones(2, 8)
                found.append(copied(x).detach())
                given = dict(training.model.named_parameters())
                found.append(torch.func.functional_call(training.model, given, (x,)).detach())
        return [*found, *values(training)]

    managed = lambda one: manage(one.optimizer, model=one.model, parameters="all")  # noqa: E731
    assert same(run(begin(ADAMW), lambda _: contextlib.nullcontext()), run(begin(ADAMW), managed))


class RunsAgain(torch.autograd.Function):
    """Runs a layer again in its backward, whose own backward makes the gradients: the function itself gives none."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: nn.Module, *parameters: nn.Parameter) -> torch.Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)
        with torch.no_grad():
            made: torch.Tensor = layer(x)
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            ctx.layer(x).backward(gradients[0])
        return x.grad, None, *[None for _ in ctx.layer.parameters()]


def test_a_function_that_gives_its_parameters_no_gradient_has_the_bits(manage: Manage) -> None:
    def run(is_managed: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        optimizer = torch.optim.AdamW(model.parameters())
        inside = manage(optimizer, model=model, parameters="all") if is_managed else contextlib.nullcontext()
        with inside:
            for _ in range(3):
                x = torch.ones(2, 8, requires_grad=True)
                for layer in model:
                    x = RunsAgain.apply(x, layer, *layer.parameters())
                x.square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        return [one.detach().clone() for one in model.parameters()]

    assert same(run(False), run(True))


def test_a_selective_checkpoint_counts_none_of_our_operations(manage: Manage) -> None:
    """It refuses a recompute that runs an operation more often than the forward did. The copies of parameters come at
    other places there."""

    def run(training: Training, inside: Any) -> list[Any]:
        def policy(_: object, operation: object, *args: object, **named: object) -> CheckpointPolicy:
            is_product = operation is torch.ops.aten.addmm.default
            return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE

        layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)) for _ in range(3))
        training.model, training.optimizer = layers, ADAMW(layers.parameters())
        with inside(training):
            for _ in range(3):
                x = torch.ones(2, 8)
                for layer in layers:
                    choose = functools.partial(create_selective_checkpoint_contexts, policy)
                    x = checkpoint(layer, x, use_reentrant=False, context_fn=choose)
                x.square().mean().backward()
                training.optimizer.step()
                training.optimizer.zero_grad()
        return values(training)

    managed = lambda one: manage(one.optimizer, model=one.model, parameters="all")  # noqa: E731
    assert same(run(begin(ADAMW), lambda _: contextlib.nullcontext()), run(begin(ADAMW), managed))


def test_what_the_program_moves_is_refused_and_nothing_is_lost(manage: Manage) -> None:
    training = begin(ADAMW)
    with manage(training.optimizer, model=training.model, parameters="all"):
        one_step(training)
        weight = training.model.get_parameter("inner.weight")
        expected = weight.detach().double()
        weight.data = weight.data.double()
        with pytest.raises(VdnnError, match=r"parameter inner\.weight was moved or replaced"):
            training.loss()
        assert torch.equal(weight, expected)
    assert torch.equal(weight, expected)


def test_bad_input() -> None:
    training = begin(ADAMW)
    with pytest.raises(ValueError, match="parameters: which optimizer trains all of them"):
        vdnn.offload(device="sim", model=training.model, parameters="all")


def test_a_parameter_without_an_optimizer_stays_and_is_named(manage: Manage) -> None:
    training = begin(lambda given: ADAMW(list(given)[1:]))
    with manage(training.optimizer, model=training.model, parameters="all") as session:
        one_step(training)
        assert are_on_host(training) == [False, *[True] * (len(are_on_host(training)) - 1)]
        assert "parameter inner.weight stays on the device: it is trained, and no optimizer" in session.report()
