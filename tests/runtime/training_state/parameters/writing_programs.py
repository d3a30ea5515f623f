"""Programs that write to parameters, hold their memory or step in unusual places, and the plain runs of them.

Each trains a few steps and returns all that can differ. `inside` makes the context of the training; a program knows
nothing of a session. Writes begin in the third call of a module, unless they say so.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

STEPS = 4
WIDTH = 8
Inside = Callable[[nn.Module, torch.optim.Optimizer], AbstractContextManager[Any]]


class Writing(nn.Linear):
    """Calls `write(weight)` in forward, from call `first` on."""

    def __init__(self, write: Callable[[torch.Tensor], object], first: int = 2) -> None:
        super().__init__(WIDTH, WIDTH)
        self.write, self.first, self.calls = write, first, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.calls >= self.first:
            self.write(self.weight)
        self.calls += 1
        return super().forward(x)


def _no_grad(write: Callable[[torch.Tensor], object]) -> Callable[[torch.Tensor], None]:
    def under_no_grad(weight: torch.Tensor) -> None:
        with torch.no_grad():
            write(weight)

    return under_no_grad


WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "no_grad": _no_grad(lambda weight: weight.clamp_(-0.3, 0.3)),
    "copy_": _no_grad(lambda weight: weight.copy_(weight * 0.9)),
    "index": _no_grad(lambda weight: weight.__setitem__(0, 0.1)),
    "foreach": _no_grad(lambda weight: torch._foreach_mul_([weight], 0.9)),
    "detach": lambda weight: weight.detach().mul_(0.9),
    "view": lambda weight: weight.detach().view(-1)[3:9].zero_(),
    "data": lambda weight: weight.data.clamp_(-0.3, 0.3),
    "data-view": lambda weight: weight.data.t()[1:3].mul_(0.5),
    "data-set": lambda weight: setattr(weight, "data", weight.data * 0.9),
    "init": lambda weight: nn.init.constant_(weight, 0.01),
}


class MomentumPair(nn.Module):
    """A query encoder and a key encoder whose weights follow it, written in forward ahead of the key encoder's call."""

    def __init__(self, follow: Callable[[nn.Parameter, nn.Parameter], object]) -> None:
        super().__init__()
        self.query = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.key = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).requires_grad_(False)
        self.follow, self.calls = follow, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query = self.query(x)
        with torch.no_grad():
            if self.calls >= 2:
                for key, one in zip(self.key.parameters(), self.query.parameters(), strict=True):
                    self.follow(key, one)
            keys = self.key(x)
        self.calls += 1
        return torch.stack([query, keys])


FOLLOWS: dict[str, Callable[[Any, Any], object]] = {
    "data": lambda key, query: setattr(key, "data", key.data * 0.9 + query.data * 0.1),  # MoCo
    "mul-add": lambda key, query: key.mul_(0.9).add_(query, alpha=0.1),
    "lerp": lambda key, query: key.lerp_(query, 0.1),
    "data-mul": lambda key, query: key.data.mul_(0.9).add_(0.1 * query.detach().data),  # DINO
    "copy": lambda key, query: key.copy_(query),
    "detach": lambda key, query: key.detach().mul_(0.9).add_(query.detach(), alpha=0.1),
}


class Renormalized(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, WIDTH, max_norm=0.7, **options)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outcome: torch.Tensor = self.head(self.embedding((x.abs() * 7).long() % 16)).mean(1)
        return outcome


class Initialized(nn.Module):
    """Sets its scale from its first batch, as ActNorm does."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.is_ready = False
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_ready:
            self.scale.data.copy_(1 / (x.std(0) + 1e-3))
            self.is_ready = True
        outcome: torch.Tensor = self.head(x * self.scale)
        return outcome


class HiddenTie(nn.Module):
    """Reads the weight of another module, which it has in a list that torch does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.kept = [self.first.weight]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(self.last(self.first(x).tanh()), self.kept[0])


class Returned(nn.Module):
    """Reads a parameter, and a view of one, that another module returns."""

    class Weights(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = (nn.Parameter(torch.randn(WIDTH, WIDTH) / 4) for _ in range(2))

        def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
            return self.one, self.other.t()

    def __init__(self) -> None:
        super().__init__()
        self.weights = self.Weights()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, other = self.weights()
        return linear(self.inner(linear(x, one)), other)


def with_linear(*before: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *before, nn.Linear(WIDTH, WIDTH))


def _writing(write: Callable[[torch.Tensor], object]) -> nn.Module:
    return with_linear(Writing(write), Writing(write, 0))


MODELS: dict[str, Callable[[], nn.Module]] = {
    **{f"write-{name}": partial(_writing, write) for name, write in WRITES.items()},
    **{f"follow-{name}": partial(MomentumPair, follow) for name, follow in FOLLOWS.items()},
    "max-norm": Renormalized,
    "max-norm-2": lambda: Renormalized(norm_type=1.0),
    "max-norm-scaled": lambda: Renormalized(scale_grad_by_freq=True),
    "initialized": Initialized,
    "hidden-tie": HiddenTie,
    "returned": Returned,
    "spectral": lambda: with_linear(nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))),
    "spectral-old": lambda: with_linear(nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))),
    "weight-norm": lambda: with_linear(nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))),
    "orthogonal": lambda: with_linear(nn.utils.parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH))),
}


def made(model: str) -> nn.Module:
    torch.manual_seed(7)
    return MODELS[model]()


def batches(number: int = STEPS) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(8)
    return [torch.randn(5, WIDTH, generator=generator) for _ in range(number)]


def plain(model: nn.Module, optimizer: torch.optim.Optimizer) -> AbstractContextManager[None]:
    return contextlib.nullcontext()


def optimizer_of(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2, **options)


def train(model: nn.Module, inside: Inside = plain, **options: Any) -> list[torch.Tensor]:
    """Losses, gradients and parameters of all steps."""
    optimizer = optimizer_of(model, **options)
    found: list[torch.Tensor] = []
    with inside(model, optimizer):
        for batch in batches():
            loss = model(batch).square().mean()
            loss.backward()
            found.append(loss.detach())
            found += [one.grad.clone() for one in model.parameters() if one.grad is not None]
            optimizer.step()
            optimizer.zero_grad()
            found += [one.detach().clone() for one in model.parameters()]
    return found + [one.detach().clone() for one in model.parameters()]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
