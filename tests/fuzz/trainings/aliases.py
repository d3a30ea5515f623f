"""Aliases of parameters, gradients, states and buffers, and writes to all of these, by any means that torch offers."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tests.fuzz.program import Statement
from tests.fuzz.trainings.blocks import WRITES, write
from tests.fuzz.trainings.grammar import statement
from tests.fuzz.trainings.world import Alias

if TYPE_CHECKING:
    from tests.fuzz.trainings.world import Run, Training

Tensor = torch.Tensor
KINDS = ("parameter", "parameter", "gradient", "gradient", "state", "buffer", "model", "optimizer")
# Without `view` for a state: documented to lose its memory when the session is closed.
_ALL = -1  # all of that kind in a net
HOWS = ("itself", "detach", "data", "view", "numpy", "dlpack", "storage")


def reader(tensor: Tensor, how: str) -> Callable[[], Tensor]:
    """Takes hold of the tensor's memory, and returns how a tensor over it is made."""
    if how == "numpy":
        array: Any = tensor.detach().numpy()
        return lambda: torch.from_numpy(array)
    if how == "storage":
        storage, dtype, size, stride = tensor.untyped_storage(), tensor.dtype, tensor.size(), tensor.stride()
        offset = tensor.storage_offset()
        return lambda: torch.empty(0, dtype=dtype).set_(storage, offset, size, stride)
    if how == "itself":
        return lambda: tensor
    if how == "dlpack":
        found = torch.utils.dlpack.from_dlpack(tensor.detach())
    elif how == "view":
        found = tensor.detach().view(-1)[: max(1, tensor.numel() // 2)]
    else:
        found = tensor.data if how == "data" else tensor.detach()
    return lambda: found


def _draw_alias(random: Random) -> tuple[Any, ...]:
    return random.choice(KINDS), random.choice(HOWS), random.randrange(2), random.choice([_ALL, _ALL, *range(6)])


@statement("alias", _draw_alias, 2.5)
def _alias(world: Training, one: Statement) -> Run:
    what, how, part, number = one.args

    def run() -> None:
        found = _targets(world, what, part, number)
        if what in ("state", "optimizer"):
            found = [one for one in found if one.dim()]
        taken = how if what not in ("state", "optimizer") or how != "view" else "detach"
        for tensor in found:
            if tensor.is_contiguous() and tensor.layout == torch.strided:
                label = f"of a {what} by {taken}"
                world.aliases.append(Alias(label, reader(tensor, taken), world.is_inside and what != "gradient"))

    return run


def _targets(world: Training, what: str, part: int, number: int) -> list[Tensor]:
    """The tensors of that kind: one of them, or all of a state_dict()."""
    net, optimizer = world.net(part), world.optimizer(part)
    if net is None:
        return []
    parameters = _chosen(list(net.parameters()), number)
    if what == "parameter":
        return parameters
    if what == "gradient":
        return [one.grad for one in parameters if one.grad is not None]
    if what == "buffer":
        return _chosen(list(net.buffers()), number)
    if what == "model":
        return list(net.state_dict().values())
    if optimizer is None:
        return []
    if what == "state":
        states = [optimizer.state.get(one, {}) for one in parameters]
        return [one for state in states for one in state.values() if isinstance(one, Tensor)]
    saved = optimizer.state_dict()["state"]
    return [one for number in sorted(saved) for one in saved[number].values() if isinstance(one, Tensor)]


def _chosen(found: list[Any], number: int) -> list[Any]:
    return found if number == _ALL or not found else [found[number % len(found)]]


@statement("read_aliases", weight=1.5)
def _read_aliases(world: Training, one: Statement) -> Run:
    return world.note_aliases


@statement("write_alias", lambda random: (random.randrange(6),), 1.5)
def _write_alias(world: Training, one: Statement) -> Run:
    (number,) = one.args

    def run() -> None:
        if not world.aliases:
            return
        tensor = world.aliases[number % len(world.aliases)].read()
        if tensor.is_floating_point():
            world.unseen_writes += 1
            with torch.no_grad():
                tensor.mul_(0.75)

    return run


@statement("drop_aliases", weight=0.3)
def _drop_aliases(world: Training, one: Statement) -> Run:
    return world.aliases.clear


def _draw_write(random: Random) -> tuple[Any, ...]:
    return random.choice(KINDS[:6]), random.choice(WRITES), random.randrange(2), random.randrange(8)


@statement("write", _draw_write, 2)
def _write(world: Training, one: Statement) -> Run:
    what, how, part, number = one.args

    def run() -> None:
        for tensor in _targets(world, what, part, number):
            if tensor.is_floating_point() and tensor.dim():
                world.unseen_writes += how in ("data", "numpy")
                write(tensor, how, 0.05 * (1 + world.step))

    return run


@statement("replace_data", lambda random: (random.randrange(2), random.randrange(8)), 0.3)
def _replace_data(world: Training, one: Statement) -> Run:
    def run() -> None:
        parameter = world.parameter(*one.args)
        if parameter is not None and parameter.is_floating_point():
            world.unseen_writes += 1
            parameter.data = parameter.data * 0.9

    return run


_GIVEN = ("none", "none", "full", "full", "a number", "another shape", "another dtype")


@statement("set_gradient", lambda random: (random.randrange(2), random.randrange(8), random.choice(_GIVEN)), 0.8)
def _set_gradient(world: Training, one: Statement) -> Run:
    """Gives a parameter another gradient, or what torch refuses as one."""
    part, number, what = one.args

    def run() -> None:
        parameter: Any = world.parameter(part, number)
        if parameter is None or not parameter.requires_grad:
            return
        given: Any = None
        if what == "a number":
            given = 3
        elif what != "none":
            shape = (3, 3) if what == "another shape" else parameter.shape
            given = torch.full(shape, 0.1, dtype=torch.float64 if what == "another dtype" else None)
        try:
            parameter.grad = given
        except (RuntimeError, TypeError) as error:
            world.trace.append((f"refused as a gradient: {error!r}", b""))

    return run


_OBSERVED = ("gradients", "parameters", "state", "buffers", "norms")


@statement("observe", lambda random: (random.choice(_OBSERVED),), 1.5)
def _observe(world: Training, one: Statement) -> Run:
    (what,) = one.args

    def run() -> None:
        if what == "gradients":
            world.note_gradients()
        elif what == "parameters":
            world.note_parameters()
        elif what == "state":
            world.note_state()
        elif what == "buffers":
            world.note_buffers()
        else:
            for part, net in world.nets.items():
                world.note(f"norm of net {part}", _norm_of(net))

    return run


def _norm_of(net: nn.Module) -> Tensor | None:
    norms = [one.detach().norm() for one in net.parameters() if one.is_floating_point()]
    return torch.stack(norms).norm() if norms else None
