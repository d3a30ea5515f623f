"""Parameter groups come and go, and gradients, steps and state are those of the groups that the optimizer has then."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.runtime.training_state.conftest import Manage
from tests.runtime.training_state.loops import SignOfMomentum, Training
from tests.runtime.training_state.programs import check, every_way

STEPS = 6


def divided(training: Training) -> list[dict[str, Any]]:
    """The groups of the optimizer, one for each module."""
    (whole,) = training.optimizer.param_groups
    training.optimizer.param_groups.clear()
    for module in training.model.children():
        parameters = [one for one in module.parameters() if any(one is other for other in whole["params"])]
        training.optimizer.param_groups.append({**whole, "params": parameters})
    return list(training.optimizer.param_groups)


def step(training: Training, micro_batches: int = 2) -> None:
    for _ in range(micro_batches):
        training.loss().backward()
    training.optimizer.step()
    training.optimizer.zero_grad()
    training.found += [None if one.grad is None else one.grad.clone() for one in training.model.parameters()]


@every_way
def test_zero_grad_keeps_gradients_of_parameters_in_no_group(way: str, manage: Manage) -> None:
    """Gradual unfreezing: a group is taken out, its gradients sum up, and it is put back."""

    def program(training: Training) -> Iterator[None]:
        groups = divided(training)
        yield
        step(training)
        del training.optimizer.param_groups[2]
        for _ in range(2):
            step(training)
        training.optimizer.param_groups.insert(2, groups[2])
        for _ in range(2):
            step(training)

    check(program, way, manage)


@every_way
def test_groups_take_turns(way: str, manage: Manage) -> None:
    """Each step has other groups, chosen between the call of a step and the next forward."""

    def program(training: Training) -> Iterator[None]:
        groups = divided(training)
        yield
        for number in range(STEPS):
            training.optimizer.param_groups[:] = groups[number % 2 :: 2]
            step(training, 1)
            if number % 3 == 2:
                training.model.zero_grad()
        training.optimizer.param_groups[:] = groups

    check(program, way, manage)


@every_way
@pytest.mark.parametrize("how", ["del", "list", "params", "cleared", "named"])
def test_a_group_that_is_removed_behind_a_step_was_stepped(how: str, way: str, manage: Manage) -> None:
    def program(training: Training) -> Iterator[None]:
        optimizer = training.optimizer
        groups = divided(training)
        if how == "named":
            for group in groups:
                group["param_names"] = [f"{index} of {id(group)}" for index in range(len(group["params"]))]
        yield
        for _ in range(3):
            for _ in range(2):
                training.loss().backward()
            optimizer.step()
            if how == "del":
                del optimizer.param_groups[-1]
            elif how == "list":
                optimizer.param_groups = groups[1:]
            elif how in ("params", "named"):
                groups[0]["params"] = groups[0]["params"][1:]
                names = groups[0].get("param_names")
                if names is not None:
                    groups[0]["param_names"] = names[1:]
            else:
                optimizer.param_groups.clear()
            training.loss().backward()
            optimizer.param_groups = list(groups)
            training.found.append([len(group["params"]) for group in optimizer.param_groups])
            if how in ("params", "named"):
                groups[0]["params"] = list(next(training.model.children()).parameters())
                if names is not None:
                    groups[0]["param_names"] = names

    check(program, way, manage)


@every_way
def test_the_list_of_groups_is_the_one_that_the_program_holds(way: str, manage: Manage) -> None:
    def program(training: Training) -> Iterator[None]:
        held = training.optimizer.param_groups
        yield
        for _ in range(3):
            training.loss().backward()
            training.optimizer.step()
            training.found.append(training.optimizer.param_groups is held)
        training.loss()
        training.found.append(training.optimizer.param_groups is held)

    check(program, way, manage)


@every_way
def test_options_change_behind_a_step_and_groups_are_swapped(way: str, manage: Manage) -> None:
    def program(training: Training) -> Iterator[None]:
        optimizer, groups = training.optimizer, divided(training)
        yield
        for number in range(STEPS):
            for _ in range(2):
                training.loss().backward()
            optimizer.step()
            for group in optimizer.param_groups:
                group["lr"] *= 0.9
            optimizer.param_groups.reverse()
            if number == 2:
                groups[0]["params"], groups[1]["params"] = groups[1]["params"], groups[0]["params"]
            if number == 3:
                late = optimizer.param_groups.pop()
                optimizer.add_param_group({"params": late["params"], "lr": 0.003})
            optimizer.zero_grad(set_to_none=number % 2 == 0)

    check(program, way, manage)


@every_way
@pytest.mark.parametrize("make", [SignOfMomentum, lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, fused=True)])
def test_the_state_of_a_group_that_is_put_back_behind_the_session_is_on_the_device(
    make: Any, way: str, manage: Manage
) -> None:
    """A group that was taken out has its state in memory of the host that ends with the session."""

    def program(training: Training) -> Iterator[None]:
        groups = divided(training)
        yield
        for _ in range(2):
            step(training)
        del training.optimizer.param_groups[1]
        step(training)
        yield
        training.optimizer.param_groups.insert(1, groups[1])
        step(training)

    check(program, way, manage, make)


@every_way
def test_zero_grad_of_a_program_outlives_the_session(way: str, manage: Manage) -> None:
    calls: list[bool] = []

    def program(training: Training) -> Iterator[None]:
        own = training.optimizer.zero_grad

        def zero_grad(set_to_none: bool = True) -> None:
            calls.append(set_to_none)
            own(set_to_none)

        training.optimizer.zero_grad = zero_grad  # type: ignore[method-assign]
        yield
        for _ in range(3):
            step(training)
        training.found.append(vars(training.optimizer)["zero_grad"] is zero_grad)

    check(program, way, manage)
    assert len(calls) == 9
    assert torch.optim.Optimizer.zero_grad.__name__ == "zero_grad"
    assert "vdnn" not in torch.optim.Optimizer.zero_grad.__module__


@every_way
def test_states_are_in_the_order_in_which_plain_pytorch_makes_them(way: str, manage: Manage) -> None:
    """A group is removed behind the step that made its state."""

    def program(training: Training) -> Iterator[None]:
        groups = divided(training)
        yield
        for removed in (1, 3, 2):
            training.optimizer.param_groups[:] = groups[1:] if removed == 1 else groups
            training.loss().backward()
            training.optimizer.step()
            del training.optimizer.param_groups[removed]
            training.loss()
            names = {id(parameter): name for name, parameter in training.model.named_parameters()}
            training.found.append([names[id(one)] for one in training.optimizer.state])
        training.optimizer.param_groups[:] = groups

    check(program, way, manage)
