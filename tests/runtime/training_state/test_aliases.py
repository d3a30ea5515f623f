"""Whoever holds the memory of a gradient or of a state goes on to see it and to write to it, whatever holds it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.runtime.training_state.conftest import Manage, on_host
from tests.runtime.training_state.loops import Training, begin
from tests.runtime.training_state.programs import adamw, check, every_way

Alias = Callable[[torch.Tensor], Any]


def _values(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0).set_(storage)  # type: ignore[call-overload, no-any-return]


# How to hold memory, and the tensor through which it is read and written later.
ALIASES: dict[str, tuple[Alias, Alias]] = {
    "tensor": (lambda tensor: tensor, lambda held: held),
    "list": (lambda tensor: [tensor], lambda held: held[0]),
    "detached": (lambda tensor: tensor.detach(), lambda held: held),
    "view": (lambda tensor: tensor.detach().view(-1)[1:], lambda held: held),
    "storage": (lambda tensor: tensor.untyped_storage(), _values),
    "numpy": (lambda tensor: tensor.detach().numpy(), torch.from_numpy),
    "dlpack": (lambda tensor: torch.from_dlpack(tensor), lambda held: held),
    "numpy by dlpack": (lambda tensor: np.from_dlpack(tensor), torch.from_dlpack),  # type: ignore[arg-type]
    "capsule": (torch.utils.dlpack.to_dlpack, lambda held: None),
}


def train(training: Training) -> None:
    for _ in range(2):
        training.loss().backward()
    training.optimizer.step()


@every_way
@pytest.mark.parametrize("alias", ALIASES)
def test_an_alias_of_gradients_sees_the_next_micro_batch_and_writes_to_the_sum(
    alias: str, way: str, manage: Manage
) -> None:
    hold, read = ALIASES[alias]

    def program(training: Training) -> Iterator[None]:
        parameters = list(training.model.parameters())
        training.loss().backward()
        held = [hold(one.grad) for one in parameters[::3]]  # type: ignore[arg-type]
        yield
        training.loss().backward()
        held += [hold(one.grad) for one in parameters[1::3]]  # type: ignore[arg-type]
        for _ in range(2):
            training.loss().backward()
            found = [one for one in map(read, held) if one is not None]
            training.found += [one.clone() for one in found]
            for one in found:
                one.mul_(0.5)
        training.optimizer.step()
        training.found += [one.clone() for one in map(read, held) if one is not None]
        training.optimizer.zero_grad(set_to_none=False)
        train(training)
        del held
        training.optimizer.zero_grad()
        train(training)

    check(program, way, manage)


@every_way
@pytest.mark.parametrize("alias", ALIASES)
def test_an_alias_of_the_state_from_before_the_session_sees_each_step_and_writes_to_it(
    alias: str, way: str, manage: Manage
) -> None:
    hold, read = ALIASES[alias]

    def program(training: Training) -> Iterator[None]:
        train(training)
        training.optimizer.zero_grad()
        held = [hold(state["exp_avg"]) for state in training.optimizer.state.values()]
        yield
        for _ in range(3):
            train(training)
            training.optimizer.zero_grad()
            training.optimizer.state  # noqa: B018  # a deferred step runs now
            found = [one for one in map(read, held) if one is not None]
            training.found += [one.clone() for one in found]
            for one in found:
                one.mul_(0.5)
        del held, found
        train(training)

    check(program, way, manage)


@every_way
def test_a_state_dict_from_before_the_session_follows_the_training(way: str, manage: Manage) -> None:
    """Its dicts are those of the optimizer, so they have the tensors that the optimizer has."""

    def program(training: Training) -> Iterator[None]:
        train(training)
        saved = training.optimizer.state_dict()["state"]
        yield
        for _ in range(3):
            train(training)
            training.optimizer.zero_grad()
            training.optimizer.state  # noqa: B018
            training.found += [one["exp_avg_sq"].clone() for one in saved.values()]
        saved[2]["exp_avg"].zero_()
        train(training)

    check(program, way, manage)


@every_way
def test_a_state_dict_that_was_loaded_inside_of_the_session_follows_the_training(way: str, manage: Manage) -> None:
    def program(training: Training) -> Iterator[None]:
        other = begin(adamw)
        train(other)
        saved = other.optimizer.state_dict()
        del other
        yield
        train(training)
        training.optimizer.load_state_dict(saved)
        for _ in range(3):
            train(training)
            training.optimizer.zero_grad()
            training.optimizer.state  # noqa: B018
            training.found += [one["exp_avg_sq"].clone() for one in saved["state"].values()]

    check(program, way, manage)


@every_way
def test_tensors_that_two_optimizers_share_are_one(way: str, manage: Manage) -> None:
    """The moments of one optimizer are those of another one, which the session does not manage."""

    def program(training: Training) -> Iterator[None]:
        train(training)
        other = adamw(training.model.parameters())
        other.load_state_dict(training.optimizer.state_dict())
        yield
        for number in range(4):
            for _ in range(2):
                training.loss().backward()
            if number % 2 and "deferred" not in way:
                other.step()
            else:
                training.optimizer.step()
            training.optimizer.zero_grad()

    check(program, way, manage)


@pytest.mark.parametrize("options", [{}, {"gradients": True}, {"optimizer_step": "deferred"}], ids=str)
def test_a_state_that_was_loaded_leaves_at_the_next_call_once_nobody_else_has_it(
    options: dict[str, Any], manage: Manage
) -> None:
    """On a device that the saved tensors are on, torch loads these very tensors."""
    training, other = begin(adamw), begin(adamw)
    train(other)
    saved = other.optimizer.state_dict()
    with manage(training.optimizer, **options):
        train(training)
        training.optimizer.load_state_dict(saved)
        assert on_host(training.optimizer) == 0
        training.loss()
        assert on_host(training.optimizer) == 0
        training.optimizer.load_state_dict(saved)
        del other, saved
        training.loss()
        assert on_host(training.optimizer) == 2 * sum(one.nbytes for one in training.model.parameters())


def test_state_that_the_program_holds_stays_and_is_named_once_until_it_is_let_go(manage: Manage) -> None:
    training = begin(adamw)
    train(training)
    held: Any = next(iter(training.optimizer.state.values()))["exp_avg"].numpy()
    with manage(training.optimizer) as session:
        nbytes = on_host(training.optimizer)
        for _ in range(2):
            train(training)
        lines = [line for line in session.report().splitlines() if "holds the same memory" in line]
        assert len(lines) == 1
        assert lines[0].endswith("the program holds the same memory: exp_avg of parameter 0")
        assert on_host(training.optimizer) == nbytes
        del held
        train(training)
        assert on_host(training.optimizer) == nbytes + 8 * 12 * 4
        assert "holds the same memory" not in session.report()


def test_the_report_names_parameters_as_the_optimizer_does_and_no_more_than_three_tensors(manage: Manage) -> None:
    training = begin(lambda parameters: torch.optim.Adam(zip("abcdefghij", parameters, strict=True)))
    train(training)
    held = [dict(state) for state in training.optimizer.state.values()]
    with manage(training.optimizer) as session:
        (line,) = [line for line in session.report().splitlines() if "holds the same memory" in line]
        assert (
            "exp_avg of parameter 0 (a), exp_avg_sq of parameter 0 (a), exp_avg of parameter 1 (b) and 17 more" in line
        )
        assert on_host(training.optimizer) == 0
    assert held


@every_way
def test_a_tensor_that_the_program_puts_into_a_second_place_is_one(way: str, manage: Manage) -> None:
    def program(training: Training) -> Iterator[None]:
        model: Any = training.model
        one, other = model.between.weight, model.last.weight
        yield
        train(training)
        states = training.optimizer.state
        states[one], states[other] = states[other], states[one]
        train(training)
        states[one]["exp_avg"] = states[other]["exp_avg"]
        del states
        for _ in range(3):
            train(training)
        training.optimizer.state[one]["exp_avg"].zero_()
        train(training)

    check(program, way, manage)
