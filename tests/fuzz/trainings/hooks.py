"""Hooks of trainings: on parameters, modules and optimizers, registered ahead of the session and inside."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tests.fuzz.program import Statement
from tests.fuzz.trainings.grammar import statement

if TYPE_CHECKING:
    from tests.fuzz.trainings.world import Run, Training

Tensor = torch.Tensor
_ALL = -1  # each parameter of the net
_ON_PARAMETERS = ("read", "read", "read", "scale", "replace", "step", "drop", "alias", "value")


def _draw_accumulated(random: Random) -> tuple[Any, ...]:
    return random.choice(_ON_PARAMETERS), random.randrange(2), random.choice([_ALL, _ALL, *range(4)])


def _chosen(world: Training, part: int, number: int) -> list[nn.Parameter]:
    found = world.parameters(part)
    if number != _ALL and found:
        found = [found[number % len(found)]]
    return [one for one in found if one.requires_grad]


@statement("accumulated_hook", _draw_accumulated, 2)
def _accumulated_hook(world: Training, one: Statement) -> Run:
    """A hook behind the accumulation of a gradient: it reads it, changes it, steps, or drops it."""
    how, part, number = one.args

    def run() -> None:
        for index, parameter in enumerate(_chosen(world, part, number)):
            optimizer = torch.optim.SGD([parameter], lr=0.01) if how == "step" else None
            world.hooks.append(parameter.register_post_accumulate_grad_hook(_on_gradient(world, how, index, optimizer)))

    return run


def _on_gradient(world: Training, how: str, index: int, optimizer: Any) -> Any:
    def hook(parameter: Tensor) -> None:
        if how == "value":
            world.note(f"hook value {index}", parameter)
            return
        gradient = parameter.grad
        if gradient is None:
            return
        if how == "scale":
            gradient.mul_(0.5)
        elif how == "replace":
            parameter.grad = gradient * 0.9
        elif how == "drop":
            parameter.grad = None
        elif how == "step":
            optimizer.step()
        elif how == "alias":
            world.copies["gradient", index] = gradient
        else:
            world.note(f"hook gradient {index}", gradient.norm())

    return hook


@statement(
    "tensor_hook",
    lambda random: (random.choice(["read", "scale", "peek"]), random.randrange(2), random.choice([_ALL, *range(4)])),
    1.2,
)
def _tensor_hook(world: Training, one: Statement) -> Run:
    """A hook on the new part of a gradient. `peek` reads what is accumulated so far."""
    how, part, number = one.args

    def run() -> None:
        for index, parameter in enumerate(_chosen(world, part, number)):
            world.hooks.append(parameter.register_hook(_on_part(world, how, index, parameter)))

    return run


def _on_part(world: Training, how: str, index: int, parameter: nn.Parameter) -> Any:
    def hook(gradient: Tensor) -> Tensor | None:
        if how == "scale":
            return gradient * 0.5
        world.note(f"tensor hook {index}", gradient if how == "read" else parameter.grad)
        return None

    return hook


_ON_MODULES = ("forward_pre", "forward", "backward_pre", "backward")
_MODULE_ACTS = ("read", "read", "change", "write", "weights", "gradients")


def _draw_module_hook(random: Random) -> tuple[Any, ...]:
    return random.choice(_ON_MODULES), random.choice(_MODULE_ACTS), random.randrange(2), random.randrange(12)


@statement("module_hook", _draw_module_hook, 1.5)
def _module_hook(world: Training, one: Statement) -> Run:
    where, how, part, number = one.args

    def run() -> None:
        net = world.net(part)
        modules = [] if net is None else [one for one in net.modules() if not isinstance(one, nn.ModuleList)]
        if modules:
            world.hooks.append(_hooked(world, modules[number % len(modules)], where, how))

    return run


def _hooked(world: Training, module: nn.Module, where: str, how: str) -> Any:
    def act(found: Any) -> Any:
        if how == "weights":
            for one in module.parameters(recurse=False):
                world.note("module hook, weight", one)
        elif how == "gradients":
            for one in module.parameters():
                world.note("module hook, gradient", one.grad)
        elif how == "write" and where == "forward_pre":
            for one in module.parameters(recurse=False):
                if one.is_floating_point():
                    with torch.no_grad():
                        one.mul_(1.01)
        elif isinstance(found, tuple) and found and isinstance(found[0], Tensor):
            if how == "change":
                return (found[0] * 0.5, *found[1:])
            world.note(f"module hook, {where}", found[0])
        elif isinstance(found, Tensor):
            if how == "change":
                return found * 0.5
            world.note(f"module hook, {where}", found)
        return None

    if where == "forward_pre":
        return module.register_forward_pre_hook(lambda _, args: act(args))
    if where == "forward":
        return module.register_forward_hook(lambda _, args, output: act(output))
    if where == "backward_pre":
        return module.register_full_backward_pre_hook(lambda _, gradients: act(gradients))
    return module.register_full_backward_hook(lambda _, gradients, __: act(gradients))


_STEP_ACTS = ("gradients", "clip", "parameters", "state", "write", "lr")


@statement(
    "optimizer_hook",
    lambda random: (random.choice(["pre", "post"]), random.choice(_STEP_ACTS), random.randrange(2)),
    1.2,
)
def _optimizer_hook(world: Training, one: Statement) -> Run:
    where, how, part = one.args

    def run() -> None:
        optimizer = world.optimizer(part)
        if optimizer is None:
            return

        def hook(stepped: Any, args: Any, kwargs: Any) -> None:
            _at_a_step(world, stepped, how)

        register = optimizer.register_step_pre_hook if where == "pre" else optimizer.register_step_post_hook
        world.hooks.append(register(hook))

    return run


def _at_a_step(world: Training, optimizer: torch.optim.Optimizer, how: str) -> None:
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    if how == "clip":
        nn.utils.clip_grad_norm_(parameters, 0.05)
    elif how == "lr":
        for group in optimizer.param_groups:
            if not isinstance(group["lr"], Tensor):
                group["lr"] *= 0.95
    elif how == "write":
        with torch.no_grad():
            for one in parameters:
                one.mul_(0.99)
    elif how == "gradients":
        for one in parameters:
            world.note("optimizer hook, gradient", one.grad)
    elif how == "parameters":
        for one in parameters:
            world.note("optimizer hook, parameter", one)
    else:
        for one in parameters:
            for name, value in optimizer.state.get(one, {}).items():
                world.note(f"optimizer hook, {name}", torch.as_tensor(value))


@statement("remove_hooks", weight=0.3)
def _remove_hooks(world: Training, one: Statement) -> Run:
    def run() -> None:
        for hook in world.hooks:
            hook.remove()
        world.hooks.clear()

    return run
