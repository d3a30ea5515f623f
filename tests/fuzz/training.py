"""Losses, backwards, optimizers and exceptions: the statements that turn the other productions into a training step."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Any

import torch

from tests.fuzz.grammar import nothing, statement
from tests.fuzz.program import Statement
from tests.fuzz.world import PlannedError

if TYPE_CHECKING:
    from tests.fuzz.world import World

Run = Callable[[], None]
LOSSES = ("sum", "square", "mean", "cross_entropy", "mse", "huber")


@statement("loss", lambda random: (random.choice(LOSSES),))
def _loss(world: World, one: Statement) -> Run:
    kind, out, ins = one.args[0], one.out, one.ins

    def run() -> None:
        total: Any = 0
        for slot in ins:
            total = total + _loss_of(world.value(slot), kind)
        world.losses[out] = total
        world.note("loss", total)

    return run


def _loss_of(x: torch.Tensor, kind: str) -> torch.Tensor:
    if kind == "sum":
        return (x * 0.1).sum()
    if kind == "square":
        return x.square().mean()
    if kind == "mean":
        return x.tanh().mean()
    flat = x.reshape(-1, 2)
    if kind == "cross_entropy":
        return torch.nn.functional.cross_entropy(flat, torch.zeros(len(flat), dtype=torch.int64))
    if kind == "mse":
        return torch.nn.functional.mse_loss(flat, torch.ones_like(flat))
    return torch.nn.functional.huber_loss(flat, torch.zeros_like(flat))


@statement("backward", lambda random: (random.choice(["plain"] * 6 + ["retain", "twice", "inputs"]),))
def _backward(world: World, one: Statement) -> Run:
    (how,), slots = one.args, one.ins

    def run() -> None:
        for slot in slots:
            loss = world.losses.pop(slot, None)
            if loss is None or not loss.requires_grad:
                continue
            if how == "twice":
                loss.backward(retain_graph=True)
                world.note_gradients()
                loss.backward()
            elif how == "inputs":
                trained = [one for one in world.all_parameters() if one.requires_grad]
                loss.backward(inputs=trained)
            elif how == "retain":
                loss.backward(retain_graph=True)
                world.losses[slot] = loss
            else:
                loss.backward()
        world.note_gradients()

    return run


@statement("gradient_penalty", lambda random: (random.choice(["input", "parameters"]),))
def _gradient_penalty(world: World, one: Statement) -> Run:
    """Uses the gradient of one loss in another loss: a double backward."""

    def run() -> None:
        loss = world.losses.get(one.ins[0])
        if loss is None or not loss.requires_grad:
            return
        wanted: list[torch.Tensor] = [one for one in world.all_parameters() if one.requires_grad]
        slopes = torch.autograd.grad(loss, wanted, create_graph=True, allow_unused=True)
        found = [slope.square().sum() for slope in slopes if slope is not None and slope.requires_grad]  # type: ignore[redundant-expr]
        if found:
            world.losses[one.out] = loss + 0.1 * sum(found[1:], found[0])
            world.note("penalty", world.losses[one.out])

    return run


@statement("zero_grad", lambda random: (random.random() < 0.85,))
def _zero_grad(world: World, one: Statement) -> Run:
    def run() -> None:
        for parameter in world.all_parameters():
            if parameter.grad is None:
                continue
            if one.args[0]:
                parameter.grad = None
            else:
                parameter.grad.detach_().zero_()

    return run


def _optimizer(kind: str, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    if kind == "adam":
        return torch.optim.Adam(parameters, lr=0.01, foreach=False)
    momentum = 0.9 if kind == "momentum" else 0.0
    return torch.optim.SGD(parameters, lr=0.05, momentum=momentum, foreach=kind == "foreach")


OPTIMIZERS = ("sgd", "sgd", "momentum", "adam", "foreach")


@statement("step", nothing)
def _step(world: World, one: Statement) -> Run:
    """A step of one network's optimizer, which is made at its first step, when the parameters are known."""
    part, kind = one.args

    def run() -> None:
        optimizer = world.optimizers.get(part)
        if optimizer is None:
            if not world.parameters[part]:
                return
            optimizer = world.optimizers[part] = _optimizer(kind, world.parameters[part])
        optimizer.step()

    return run


@statement("step_in_backward", lambda random: (random.choice(["sgd", "momentum"]), random.random() < 0.5))
def _step_in_backward(world: World, one: Statement) -> Run:
    """One optimizer for each parameter, which steps as soon as that gradient is computed."""
    kind, forgets = one.args

    def run() -> None:
        if world.optimizers.get("hooks") is not None:
            return
        for index, parameter in enumerate(world.all_parameters()):
            if not parameter.requires_grad:
                continue
            optimizer = world.optimizers["hooks"] = world.optimizers["hooks", index] = _optimizer(kind, [parameter])
            parameter.register_post_accumulate_grad_hook(_stepper(optimizer, forgets))

    return run


def _stepper(optimizer: torch.optim.Optimizer, forgets: bool) -> Callable[[torch.Tensor], None]:
    def step(parameter: torch.Tensor) -> None:
        optimizer.step()
        if forgets:
            optimizer.zero_grad()

    return step


@statement("raise")
def _raise(world: World, one: Statement) -> Run:
    def run() -> None:
        raise PlannedError("in the forward")

    return run


@statement("raise_in_hook")
def _raise_in_hook(world: World, one: Statement) -> Run:
    def run() -> None:
        x = world.value(one.ins[0])
        if x.requires_grad:
            x.register_hook(raiser)

    def raiser(gradient: torch.Tensor) -> None:
        if world.hooks_raise:
            raise PlannedError("in the backward")

    return run


@statement("keep_loss")
def _keep_loss(world: World, one: Statement) -> Run:
    """Keeps a graph beyond its step."""

    def run() -> None:
        loss = world.losses.get(one.ins[0])
        if loss is not None:
            world.over_steps[one.out] = loss

    return run


@statement("late_backward")
def _late_backward(world: World, one: Statement) -> Run:
    """Runs the backward of a loss that an earlier step kept."""

    def run() -> None:
        loss = world.over_steps.pop(one.ins[0], None)
        if loss is not None and loss.requires_grad:
            loss.backward()
            world.note_gradients()

    return run


def draw_kind(random: Random) -> str:
    return random.choice(OPTIMIZERS)
