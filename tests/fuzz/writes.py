"""Writes in place, at any time: visible to autograd's version counters, or not."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Any

import torch

from tests.fuzz.grammar import statement
from tests.fuzz.program import Statement

if TYPE_CHECKING:
    from tests.fuzz.world import World

Run = Callable[[], None]
TO_VALUES = ("no_grad", "detach", "view", "data", "data_view", "numpy", "add_")
TO_PARAMETERS = ("data", "no_grad", "numpy", "detach", "hand_step", "data_replaced")
INVISIBLE = frozenset({"data", "data_view", "numpy", "data_replaced"})


def _draw_value_write(random: Random) -> tuple[Any, ...]:
    return (random.choice(TO_VALUES),)


@statement("write_value", _draw_value_write)
def _write_value(world: World, one: Statement) -> Run:
    """Writes to a value. If autograd does not see the write, the world holds the value until the end of the step;
    otherwise plain PyTorch would see a write that no copy can see (tests/runtime/session/test_inplace.py)."""
    (how,), (slot,) = one.args, one.ins

    def run() -> None:
        x = world.value(slot)
        if how in INVISIBLE:
            world.held.append(x)
        _note(world, one, how)
        with torch.set_grad_enabled(torch.is_grad_enabled() and how == "add_"):
            world.note_write_to_value(x)
        write(x, how, world.step)

    return run


def _note(world: World, one: Statement, how: str) -> None:
    world.note_write(one, is_seen=how not in INVISIBLE)


def write(x: torch.Tensor, how: str, step: int) -> None:
    amount = 0.125 * (1 + step)
    if how == "no_grad":
        with torch.no_grad():
            x.add_(amount)
    elif how == "detach":
        x.detach().mul_(1.0 + amount)
    elif how == "view":
        with torch.no_grad():
            x.view(-1)[:1].add_(amount) if x.is_contiguous() else x.add_(amount)
    elif how == "data":
        x.data.add_(amount)
    elif how == "data_view":
        x.data[:1].mul_(1.0 + amount)
    elif how == "numpy":
        array = x.detach().numpy()
        array += amount
    else:
        x.add_(amount)


@statement("write_parameter", lambda random: (random.choice(TO_PARAMETERS), random.randrange(8), random.randrange(2)))
def _write_parameter(world: World, one: Statement) -> Run:
    how, number, part = one.args

    def run() -> None:
        owned = world.parameters[part] or world.parameters[1 - part]
        if not owned:
            return
        _note(world, one, how)
        _write_to(owned[number % len(owned)], how, world)

    return run


def _write_to(parameter: torch.nn.Parameter, how: str, world: World) -> None:
    amount = 0.03 * (1 + world.step)
    if how == "data":
        parameter.data.add_(amount)
    elif how == "data_replaced":
        parameter.data = parameter.data + amount
    elif how == "numpy":
        array = parameter.detach().numpy()
        array += amount
    elif how == "detach":
        parameter.detach().sub_(amount)
    elif how == "hand_step" and parameter.grad is not None:
        with torch.no_grad():
            parameter.sub_(parameter.grad, alpha=0.05)
    else:
        with torch.no_grad():
            parameter.add_(amount)


@statement("write_buffer", lambda random: (random.choice(["add", "data", "copy"]), random.randrange(8)))
def _write_buffer(world: World, one: Statement) -> Run:
    how, number = one.args

    def run() -> None:
        if not world.buffers:
            return
        buffer = world.buffers[number % len(world.buffers)]
        _note(world, one, how)
        if how == "add":
            buffer.add_(0.1)
        elif how == "data":
            buffer.data.add_(0.1)
        else:
            buffer.copy_(buffer * 0.9)

    return run


@statement("write_input", lambda random: (random.choice(["add_", "data", "numpy"]),))
def _write_input(world: World, one: Statement) -> Run:
    """Writes to the batch, as a loader does that reuses one tensor."""

    def run() -> None:
        x = world.values[0]
        _note(world, one, one.args[0])
        write(x, one.args[0], world.step)

    return run


@statement("write_in_hook", lambda random: (random.choice(TO_VALUES), random.random() < 0.5))
def _write_in_hook(world: World, one: Statement) -> Run:
    """Writes to one value when the gradient of another is ready, within the backward."""
    (how, at_node), (watched, written) = one.args, one.ins

    def run() -> None:
        x, target = world.value(watched), world.value(written)
        if not x.requires_grad:
            return
        step = world.step

        def hook(*_: object) -> None:
            _note(world, one, how)
            with torch.no_grad():
                write(target, how, step)

        if at_node and x.grad_fn is not None:
            x.grad_fn.register_prehook(hook)
        else:
            x.register_hook(hook)

    return run
