"""Custom autograd Functions of the grammar: what they save, how often they read it, and whether they overwrite it."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Any

import torch

from tests.fuzz.grammar import operation
from tests.fuzz.shapes import fitted

if TYPE_CHECKING:
    from tests.fuzz.world import World

Tensor = torch.Tensor
Apply = Callable[[Tensor], Tensor]


class _Square(torch.autograd.Function):
    """Saves its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, overwrites: bool, reads: int) -> Tensor:
        ctx.save_for_backward(x)
        ctx.how = overwrites, reads
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        overwrites, reads = ctx.how
        for _ in range(reads):
            (x,) = ctx.saved_tensors
        if overwrites:
            return x.mul_(2).mul_(gradient), None, None
        return x * 2 * gradient, None, None


class _Tanh(torch.autograd.Function):
    """Saves its output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, overwrites: bool, reads: int) -> Tensor:
        y = x.tanh()
        ctx.save_for_backward(y)
        ctx.how = overwrites, reads
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        overwrites, reads = ctx.how
        for _ in range(reads):
            (y,) = ctx.saved_tensors
        if overwrites:
            return y.square_().neg_().add_(1).mul_(gradient), None, None
        return (1 - y * y) * gradient, None, None


class _Swish(torch.autograd.Function):
    """Saves its input and an intermediate result that no other node saves."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, overwrites: bool, reads: int) -> Tensor:
        gate = x.sigmoid()
        ctx.save_for_backward(x, gate)
        ctx.how = overwrites, reads
        return x * gate

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        overwrites, reads = ctx.how
        for _ in range(reads):
            x, gate = ctx.saved_tensors
        slope = gate + x * gate * (1 - gate)
        if overwrites:
            return gate.copy_(slope).mul_(gradient), None, None
        return slope * gradient, None, None


class _Twice(torch.autograd.Function):
    """Saves its input twice, and a view of it. The gradient is an arbitrary formula, in which a write through one of
    the three shows in the others."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, overwrites: bool, reads: int) -> Tensor:
        ctx.save_for_backward(x, x, x.detach()[:1])
        ctx.how = overwrites, reads
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        overwrites, reads = ctx.how
        for _ in range(reads):
            x, again, part = ctx.saved_tensors
        if overwrites:
            return x.add_(again).mul_(gradient).add_(part, alpha=0.1), None, None
        return (x + again) * gradient + part * 0.1, None, None


class _OnContext(torch.autograd.Function):
    """Keeps a detached copy on the context, as much code does, and saves the input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, overwrites: bool, reads: int) -> Tensor:
        ctx.kept = x.detach().cos()
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return ctx.kept * gradient + 0 * x, None, None


_FUNCTIONS: dict[str, Any] = {
    "square": _Square, "tanh": _Tanh, "swish": _Swish, "twice": _Twice, "context": _OnContext
}  # fmt: skip


def _drawn(random: Random) -> tuple[Any, ...]:
    return random.choice(sorted(_FUNCTIONS)), random.random() < 0.5, random.choice([1, 1, 2])


@operation("custom", weight=3, draw=_drawn)
def _custom(world: World, name: str, overwrites: bool, reads: int) -> Apply:
    apply = _FUNCTIONS[name].apply
    return lambda x: apply(x, overwrites, reads)


@operation("custom_beside", weight=2, draw=lambda random: (*_drawn(random), random.choice(["before", "after"])))
def _custom_beside(world: World, name: str, overwrites: bool, reads: int, where: str) -> Apply:
    """Adds another reader of the same value, and an operation that reads the result of that reader."""
    apply = _FUNCTIONS[name].apply

    def applied(x: Tensor) -> Tensor:
        if where == "before":
            return x.relu() * x.detach().sigmoid() + apply(x, overwrites, reads)
        one = apply(x, overwrites, reads)
        return one + torch.sigmoid(x).square()

    return applied


class _Flags(torch.autograd.Function):
    """Saves uint8 flags as they are, and as booleans that share their bytes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, most: int, forms: str) -> Tensor:
        flags = (x.detach() * 2).abs().clamp(0, most).to(torch.uint8)
        saved = {
            "both": (flags, flags.view(torch.bool)),
            "both turned": (flags.view(torch.bool), flags),
            "bool": (flags.view(torch.bool),),
            "uint8": (flags,),
            "int8": (flags.view(torch.bool), flags.view(torch.int8)),
        }[forms]
        ctx.save_for_backward(*saved)
        return x * flags

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        total = torch.zeros_like(gradient)
        for one in ctx.saved_tensors:
            total += one if one.dtype != torch.bool else one.view(torch.uint8).float().mul(0.5)
        return gradient * total, None, None


def _drawn_flags(random: Random) -> tuple[Any, ...]:
    """Draws the step from which flags may be larger than 1, and the dtypes to save them as. If they are saved as
    booleans alone, they are large always or never: a byte other than 0 or 1 is not a valid boolean."""
    forms = random.choice(["both", "both turned", "bool", "uint8", "int8"])
    return random.choice([0, 9] if forms == "bool" else [0, 3, 4, 9]), forms


@operation("flags", weight=1.2, draw=_drawn_flags)
def _flags(world: World, first: int, forms: str) -> Apply:
    return lambda x: _Flags.apply(fitted(x), 3 if world.step >= first else 1, forms)


@operation("masked", weight=1.5, draw=lambda random: (random.choice(["where", "fill", "select", "mul", "uint8"]),))
def _masked(world: World, how: str) -> Apply:
    def applied(x: Tensor) -> Tensor:
        x = fitted(x)
        mask = x.detach() > 0.1
        if how == "where":
            return torch.where(mask, x, x * 0.1)
        if how == "fill":
            return x.masked_fill(mask, 0.5)
        if how == "select":
            return x * x.masked_select(mask).sum()
        if how == "uint8":
            return x * mask.view(torch.uint8)
        return x * mask

    return applied
