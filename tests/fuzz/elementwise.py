"""Operations of the grammar that keep the shape: activations, arithmetic with tensors and numbers, dropout."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tests.fuzz.grammar import operation, simple
from tests.fuzz.shapes import fitted

if TYPE_CHECKING:
    from tests.fuzz.world import World

Tensor = torch.Tensor

_UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "gelu": nn.functional.gelu,
    "gelu_tanh": lambda x: nn.functional.gelu(x, approximate="tanh"),
    "silu": nn.functional.silu,
    "exp": lambda x: torch.exp(x.clamp(-4, 2)),
    "sin": torch.sin,
    "cos": torch.cos,
    "leaky_relu": lambda x: nn.functional.leaky_relu(x, 0.1),
    "softplus": nn.functional.softplus,
    "elu": nn.functional.elu,
    "hardswish": nn.functional.hardswish,
    "mish": nn.functional.mish,
    "sqrt": lambda x: torch.sqrt(x.abs() + 0.5),
    "rsqrt": lambda x: torch.rsqrt(x.square() + 1),
    "log": lambda x: torch.log(x.abs() + 1),
    "reciprocal": lambda x: torch.reciprocal(x.abs() + 1),
    "square": torch.square,
    "abs": torch.abs,
    "neg": torch.neg,
    "clone": torch.clone,
    "clamp": lambda x: x.clamp(-1, 1),
}
_IN_PLACE: dict[str, Callable[[Tensor], Tensor]] = {
    "relu_": torch.relu_,
    "sigmoid_": torch.sigmoid_,
    "tanh_": torch.tanh_,
    "mul_": lambda x: x.mul_(0.5),
    "add_": lambda x: x.add_(0.25),
    "leaky_relu_": lambda x: nn.functional.leaky_relu_(x, 0.2),
}
_BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mul": torch.mul,
    "add": torch.add,
    "sub": torch.sub,
    "div": lambda x, y: x / (y.abs() + 1),
    "maximum": torch.maximum,
    "add_alpha": lambda x, y: torch.add(x, y, alpha=0.3),
    "sub_alpha": lambda x, y: torch.sub(x, y, alpha=1.7),
    "addcmul": lambda x, y: torch.addcmul(x, x, y, value=0.5),
    "lerp": lambda x, y: torch.lerp(x, y, 0.3),
    "where": lambda x, y: torch.where(x > y, x, y * 0.5),
    "mul_into": lambda x, y: (x + 0).mul_(y),
    "add_into": lambda x, y: (x * 2).add_(y, alpha=0.5),
}


def _one_of(names: dict[str, Any]) -> Callable[[Random], tuple[Any, ...]]:
    listed = sorted(names)
    return lambda random: (random.choice(listed),)


@operation("pointwise", weight=6, draw=_one_of(_UNARY))
def _pointwise(world: World, name: str) -> Callable[[Tensor], Tensor]:
    return _UNARY[name]


@operation("in_place", weight=1, draw=_one_of(_IN_PLACE))
def _in_place(world: World, name: str) -> Callable[[Tensor], Tensor]:
    """Writes to an intermediate result, never to an input or a parameter."""
    apply = _IN_PLACE[name]

    def applied(x: Tensor) -> Tensor:
        if x.grad_fn is None:
            return apply(x * 1)
        world.note_write_to_value(x)
        return apply(x)

    return applied


@operation("binary", arity=2, weight=4, draw=_one_of(_BINARY))
def _binary(world: World, name: str) -> Callable[[Tensor, Tensor], Tensor]:
    apply = _BINARY[name]

    def applied(x: Tensor, y: Tensor) -> Tensor:
        if x.shape != y.shape:
            x, y = fitted(x), fitted(y)
        return apply(x, y)

    return applied


def _scalar(random: Random) -> tuple[Any, ...]:
    return random.choice(["mul", "add", "sub", "rsub", "div", "pow"]), random.choice([0.5, 2.0, 1.3, -0.7, 3])


def _scaled(x: Tensor, name: str, number: float) -> Tensor:
    if name == "mul":
        return x * number
    if name == "add":
        return x + number
    if name == "sub":
        return x - number
    if name == "rsub":
        return number - x
    if name == "div":
        return x / number
    return (x.abs() + 0.5) ** number


@operation("scalar", weight=3, draw=_scalar)
def _with_a_scalar(world: World, name: str, number: float) -> Callable[[Tensor], Tensor]:
    return lambda x: _scaled(x, name, number)


@operation("changing_scalar", weight=1.5, draw=_scalar)
def _with_a_changing_scalar(world: World, name: str, number: float) -> Callable[[Tensor], Tensor]:
    """Uses another number in each step, as a schedule or a temperature does."""
    return lambda x: _scaled(x, name, number + 0.1 * (world.step + world.schedule))


@operation("sized_by_step", weight=0.7, draw=lambda random: (random.choice([2, 3, 4, 5]), random.choice([100.0, 0.01])))
def _sized_by_step(world: World, until: int, size: float) -> Callable[[Tensor], Tensor]:
    """Large or small in the first steps, of usual size later: results that agree by coincidence at first do not agree
    later."""
    return lambda x: x * (size if world.step < until else 1.0)


@operation("zero_at_first", weight=0.4, draw=lambda random: (random.choice([2, 3, 4, 5]),))
def _zero_at_first(world: World, until: int) -> Callable[[Tensor], Tensor]:
    return lambda x: x * (0.0 if world.step < until else 1.0)


@operation("scale", weight=2)
def _scale(world: World) -> Callable[[Tensor], Tensor]:
    weight, shift = world.parameter(8, shift=1.0), world.parameter(8)
    return lambda x: fitted(x) * weight + shift


@operation("dropout", weight=1, draw=lambda random: (random.choice([0.2, 0.5]), random.random() < 0.2))
def _dropout(world: World, share: float, in_place: bool) -> Callable[[Tensor], Tensor]:
    if in_place:
        return lambda x: nn.functional.dropout(x * 1, share, inplace=True)
    return lambda x: nn.functional.dropout(x, share)


@operation("denormal", weight=0.3)
def _denormal(world: World) -> Callable[[Tensor], Tensor]:
    """Uses numbers so small that flushing them to zero shows."""
    return lambda x: (torch.tanh(x) * 3e-39).sigmoid() + (torch.tanh(x) * 1e-39) * 1e38


simple("identity", lambda x: x.view_as(x), weight=0.3)
