"""Hooks of the program hear of gradients as in plain PyTorch, whenever they were registered and whatever they read."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.runtime.training_state.conftest import Manage
from tests.runtime.training_state.loops import Training, begin
from tests.runtime.training_state.programs import adamw, check, every_way
from vdnn.runtime.torch_internals.gradient_hooks import hear_first, hear_last, is_heard_last
from vdnn.runtime.torch_internals.gradient_reads import native_gradient

STEPS = 3
Hook = Callable[[Training, str, torch.Tensor], None]


def logs_the_norm(training: Training, name: str, parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    training.found += [name, parameter.grad.norm().clone()]


def keeps_what_it_read(training: Training, name: str, parameter: torch.Tensor) -> None:
    vars(parameter).setdefault("kept", []).append(parameter.grad)
    training.found.append(parameter.grad.clone())  # type: ignore[union-attr]


def halves(training: Training, name: str, parameter: torch.Tensor) -> None:
    parameter.grad.mul_(0.5)  # type: ignore[union-attr]


def replaces(training: Training, name: str, parameter: torch.Tensor) -> None:
    parameter.grad = parameter.grad.clamp(-0.01, 0.01)  # type: ignore[union-attr]


def moves_to_another_place(training: Training, name: str, parameter: torch.Tensor) -> None:
    """As optimizers in backward and hooks that sum in fp32 do."""
    sums = vars(training.model).setdefault("sums", {})
    assert parameter.grad is not None
    sums[name] = parameter.grad.double() + sums.get(name, 0.0)
    training.found.append(sums[name].clone())
    parameter.grad = None


HOOKS: dict[str, Hook] = {
    hook.__name__: hook for hook in (logs_the_norm, keeps_what_it_read, halves, replaces, moves_to_another_place)
}


def register(training: Training, hook: Hook, label: str = "") -> list[Any]:
    def heard(name: str) -> Callable[[torch.Tensor], None]:
        return lambda parameter: hook(training, name + label, parameter)

    named = training.model.named_parameters()
    return [one.register_post_accumulate_grad_hook(heard(name)) for name, one in named]  # type: ignore[no-untyped-call]


def train(training: Training, micro_batches: int = 2, steps: int = STEPS) -> None:
    for _ in training.steps(steps):
        for _ in range(micro_batches):
            (training.loss() / micro_batches).backward()
        training.optimizer.step()


@every_way
@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_from_before_the_session_reads_and_writes_the_whole_sum(hook: str, way: str, manage: Manage) -> None:
    def program(training: Training) -> Iterator[None]:
        register(training, HOOKS[hook])
        yield
        train(training, 3)

    check(program, way, manage)


@every_way
@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_from_inside_of_the_session_reads_and_writes_the_whole_sum(hook: str, way: str, manage: Manage) -> None:
    def program(training: Training) -> Iterator[None]:
        yield
        train(training, steps=1)
        handles = register(training, HOOKS[hook])
        train(training)
        for handle in handles:
            handle.remove()
        train(training, steps=2)

    check(program, way, manage)


@every_way
def test_hooks_are_called_in_the_order_in_which_they_were_registered(way: str, manage: Manage) -> None:
    def program(training: Training) -> Iterator[None]:
        handles = register(training, logs_the_norm, "first")
        register(training, halves)
        yield
        train(training, steps=1)
        register(training, logs_the_norm, "third")
        train(training)
        for handle in handles:
            handle.remove()
        train(training)
        register(training, replaces)
        train(training)

    check(program, way, manage, tied=True)


@every_way
def test_hooks_on_the_incoming_gradient_see_the_sum_so_far(way: str, manage: Manage) -> None:
    def program(training: Training) -> Iterator[None]:
        def arrives(parameter: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
            def hook(gradient: torch.Tensor) -> torch.Tensor:
                so_far = parameter.grad
                training.found.append(None if so_far is None else so_far.clone())
                return gradient * 0.5 if so_far is None else gradient + 0.1 * so_far

            return hook

        parameters = list(training.model.parameters())
        for parameter in parameters[::2]:
            parameter.register_hook(arrives(parameter))
        yield
        for parameter in parameters[1::2]:
            parameter.register_hook(arrives(parameter))
        train(training, 3)

    check(program, way, manage)


@every_way
def test_hooks_of_nodes_and_modules_read_what_they_read_in_plain_pytorch(way: str, manage: Manage) -> None:
    def program(training: Training) -> Iterator[None]:
        def read(*_: object) -> None:
            gradients = [one.grad for one in training.model.parameters()]
            training.found.append([None if one is None else one.clone() for one in gradients])

        for module in list(training.model.children())[1::2]:
            module.register_full_backward_hook(read)
        yield
        for _ in training.steps(STEPS):
            for _ in range(2):
                loss = training.loss()
                node: Any = loss.grad_fn
                while node.next_functions:
                    node = next(one for one, _ in node.next_functions if one is not None)
                node.register_hook(read)  # of a parameter
                loss.backward()
            training.optimizer.step()

    check(program, way, manage)


@every_way
def test_an_optimizer_in_a_hook_steps_each_parameter_as_its_gradient_is_there(way: str, manage: Manage) -> None:
    def program(training: Training) -> Iterator[None]:
        others = {
            one: torch.optim.SGD([one], lr=0.01, momentum=0.9)
            for name, one in training.model.named_parameters()
            if "bias" in name
        }

        def step(parameter: torch.Tensor) -> None:
            others[parameter].step()
            others[parameter].zero_grad()

        for one in others:
            one.register_post_accumulate_grad_hook(step)  # type: ignore[no-untyped-call]
        yield
        train(training)

    check(program, way, manage)


def test_gradients_leave_behind_the_hooks_that_read_them(manage: Manage) -> None:
    training = begin(adamw)
    register(training, logs_the_norm)
    with manage(training.optimizer, gradients=True):
        for _ in range(3):
            training.loss().backward()
            assert all(native_gradient(one) is None for one in training.model.parameters())
        register(training, logs_the_norm)
        for _ in range(2):
            training.loss().backward()
            assert all(native_gradient(one) is None for one in training.model.parameters())
    assert all(len(one._post_accumulate_grad_hooks) == 2 for one in training.model.parameters())  # type: ignore[attr-defined]


def test_a_hook_that_is_put_first_or_last_is_called_there() -> None:
    heard: list[str] = []
    parameter = torch.nn.Parameter(torch.zeros(2))

    def hook(name: str) -> Callable[[torch.Tensor], None]:
        return lambda _: heard.append(name)

    second = parameter.register_post_accumulate_grad_hook(hook("second"))  # type: ignore[no-untyped-call]
    third = parameter.register_post_accumulate_grad_hook(hook("third"))  # type: ignore[no-untyped-call]
    first = hear_first(parameter, hook("first"))
    assert is_heard_last(parameter, third)
    parameter.sum().backward()
    hear_last(parameter, second)
    parameter.sum().backward()
    first.remove()
    third.remove()
    parameter.sum().backward()
    assert heard == ["first", "second", "third", "first", "third", "second", "second"]


@every_way
def test_a_hook_hears_of_a_parameter_that_was_frozen_behind_its_forward(way: str, manage: Manage) -> None:
    """torch calls it without a new gradient."""

    def reads(training: Training, name: str, parameter: torch.Tensor) -> None:
        training.found.append(None if parameter.grad is None else parameter.grad.clone())

    def program(training: Training) -> Iterator[None]:
        yield
        register(training, reads)
        for step in range(4):
            loss = training.loss()
            training.model.requires_grad_(step % 2 == 1)
            loss.backward()
            training.optimizer.step()
            training.optimizer.zero_grad()
            training.model.requires_grad_(True)

    check(program, way, manage)


@pytest.mark.parametrize("way", ["state", "gradients", "all"])
def test_hooks_that_are_registered_behind_a_swap_are_heard_and_gradients_leave_again(way: str, manage: Manage) -> None:
    """torch leaves the dict of hooks where it was, so a hook of ours there would silence all later ones."""
    options: dict[str, Any] = {"state": {}, "gradients": {"gradients": True}, "all": {"parameters": "all"}}[way]

    def run(*, is_managed: bool) -> list[Any]:
        training, found = begin(adamw), list[Any]()
        given = {**options, "model": training.model} if "parameters" in options else options
        for epoch in range(2):
            with manage(training.optimizer, **given) if is_managed else contextlib.nullcontext():
                for step in range(STEPS):
                    training.loss().backward()
                    if (epoch, step) == (0, 1):
                        for parameter in training.model.parameters():
                            torch.utils.swap_tensors(parameter, torch.nn.Parameter(parameter.detach() * 0.5))
                        register(training, logs_the_norm)
                        for name, parameter in training.model.named_parameters():
                            parameter.register_hook(lambda gradient, name=name: found.append((name, gradient.sum())))
                    norm = torch.nn.utils.clip_grad_norm_(training.model.parameters(), 0.1)
                    found.append(norm.clone())
                    training.optimizer.step()
        return [*found, *training.found, *(one.detach().clone() for one in training.model.parameters())]

    assert str(run(is_managed=False)) == str(run(is_managed=True))


@every_way
def test_parameters_are_swapped_while_they_are_frozen_and_train_later(way: str, manage: Manage) -> None:
    """torch takes hooks only while a tensor requires a gradient."""

    def program(training: Training) -> Iterator[None]:
        model: Any = training.model
        frozen = [model.inner.weight, model.between.bias]
        yield
        for step in range(6):
            for parameter in frozen:
                parameter.requires_grad_(step in (0, 4, 5))
                if step == 2:
                    halved = torch.nn.Parameter(parameter.detach() * 0.5, requires_grad=False)
                    torch.utils.swap_tensors(parameter, halved)
                training.found.append(parameter.requires_grad)
            training.loss().backward()
            training.optimizer.step()
            training.found += [None if one.grad is None else one.grad.clone() for one in frozen]
            training.optimizer.zero_grad()

    check(program, way, manage)
