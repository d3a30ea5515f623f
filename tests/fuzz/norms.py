"""Norms of the grammar: as modules, as functions, and as modules whose attributes do not match what they compute."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tests.fuzz.grammar import operation
from tests.fuzz.shapes import fitted

if TYPE_CHECKING:
    from tests.fuzz.world import World

Tensor = torch.Tensor
Apply = Callable[[Tensor], Tensor]
KINDS = ("layer", "batch", "group", "rms", "instance")
LIES = ("eps", "shift", "constant", "weight", "after", "shape")


def shaped(kind: str, x: Tensor) -> Tensor:
    x = fitted(x)
    return x if kind in ("layer", "rms") else x.reshape(2, 4, 2, 2)


def _module(kind: str, affine: bool) -> nn.Module:
    if kind == "layer":
        return nn.LayerNorm(8, elementwise_affine=affine)
    if kind == "batch":
        return nn.BatchNorm2d(4, affine=affine)
    if kind == "group":
        return nn.GroupNorm(2, 4, affine=affine)
    if kind == "rms":
        return nn.RMSNorm(8, elementwise_affine=affine)
    return nn.InstanceNorm2d(4, affine=affine)


def apply_norm(kind: str, x: Tensor, weight: Any, bias: Any, eps: float | None, shape: Any = (8,)) -> Tensor:
    if kind == "layer":
        return nn.functional.layer_norm(x, shape, weight, bias, eps or 1e-5)
    if kind == "batch":
        return nn.functional.batch_norm(x, None, None, weight, bias, True, 0.1, eps or 1e-5)
    if kind == "group":
        return nn.functional.group_norm(x, 2, weight, bias, eps or 1e-5)
    if kind == "rms":
        y = nn.functional.rms_norm(x, shape, weight, eps)
        return y if bias is None else y + bias
    return nn.functional.instance_norm(x, None, None, weight, bias, True, 0.1, eps or 1e-5)


def _drawn(random: Random) -> tuple[Any, ...]:
    return random.choice(KINDS), random.random() < 0.7


@operation("norm_module", weight=2, draw=_drawn)
def _norm_module(world: World, kind: str, affine: bool) -> Apply:
    module = world.module(_module(kind, affine))
    return lambda x: module(shaped(kind, x))


@operation("norm_function", weight=1.5, draw=lambda random: (*_drawn(random), random.choice([None, 1e-5, 1e-3, 0.1])))
def _norm_function(world: World, kind: str, affine: bool, eps: float | None) -> Apply:
    size = 8 if kind in ("layer", "rms") else 4
    weight = world.parameter(size) if affine else None
    bias = world.parameter(size) if affine and kind != "rms" else None
    return lambda x: apply_norm(kind, shaped(kind, x), weight, bias, eps)


class _Norm(nn.Module):
    """Base of the lying norms. They use `self.hidden`, which the module's attributes do not mention."""

    kind = ""
    lie = ""
    first = 0
    hidden: Tensor
    number: Tensor
    eps: Any

    def attach(self, world: World, lie: str, kind: str, first: int) -> None:
        size = 8 if kind in ("layer", "rms") else 4
        self.kind, self.lie, self.first, self.world = kind, lie, first, world
        self.register_buffer("hidden", torch.zeros(size))
        self.number = world.numbers(size)

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = getattr(self, "weight", None), getattr(self, "bias", None)
        late, eps = self.world.step >= self.first, getattr(self, "eps", None)
        shape: Any = getattr(self, "normalized_shape", (8,))
        if late:
            self.hidden.copy_(self.number).mul_(0.1 * self.world.step)
        if self.lie == "eps":
            eps = 1e-3 if eps != 1e-3 else 1e-5
        elif self.lie == "shift":
            bias = self.hidden if bias is None else bias + self.hidden
        elif self.lie == "constant":
            bias = self.hidden
        elif self.lie == "weight":
            weight = (self.hidden + 1) if weight is None else weight * (self.hidden + 1)
        elif self.lie == "shape":
            shape = torch.Size([8])
        y = apply_norm(self.kind, x, weight, bias, eps, shape)
        if self.lie == "after" and late:
            self.eps = 0.5
            y = y * 1.5
        return y


class _LyingLayerNorm(_Norm, nn.LayerNorm):
    pass


class _LyingBatchNorm(_Norm, nn.BatchNorm2d):
    pass


class _LyingGroupNorm(_Norm, nn.GroupNorm):
    pass


class _LyingRmsNorm(_Norm, nn.RMSNorm):
    pass


class _LyingInstanceNorm(_Norm, nn.InstanceNorm2d):
    pass


def _lying(kind: str, affine: bool) -> _Norm:
    if kind == "layer":
        return _LyingLayerNorm(8, elementwise_affine=affine)
    if kind == "batch":
        return _LyingBatchNorm(4, affine=affine, track_running_stats=False)
    if kind == "group":
        return _LyingGroupNorm(2, 4, affine=affine)
    if kind == "rms":
        return _LyingRmsNorm(8, elementwise_affine=affine)
    return _LyingInstanceNorm(4, affine=affine)


def _drawn_lie(random: Random) -> tuple[Any, ...]:
    return *_drawn(random), random.choice(LIES), random.choice([0, 3, 4, 5])


@operation("lying_norm", weight=2.5, draw=_drawn_lie)
def _lying_norm(world: World, kind: str, affine: bool, lie: str, first: int) -> Apply:
    """Lies from step `first` on. For `eps` it always lies, but in the steps before `first` the large input hides it."""
    module = world.module(_lying(kind, affine))
    module.attach(world, lie, kind, first)  # type: ignore[operator]
    # With `eps` the input of the first steps is so large that the lie does not show.
    sized = (lambda x: x * 1e4 if world.step < first else x) if lie == "eps" else (lambda x: x)
    return lambda x: module(shaped(kind, sized(x)))
