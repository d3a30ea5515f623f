"""Blocks of which models are made. Each maps a batch of four rows and eight columns to another one.

Among them are modules that write to parameters and buffers of their own or of their children while they run.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils import checkpoint

from tests.fuzz.shapes import COLUMNS, ROWS
from tests.fuzz.trainings.grammar import block
from tests.fuzz.trainings.world import Clock

Tensor = torch.Tensor
_ACTS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU, "tanh": nn.Tanh, "gelu": nn.GELU, "none": nn.Identity
}  # fmt: skip


def _one_of(*names: Any) -> Callable[[Random], tuple[Any, ...]]:
    return lambda random: (random.choice(names),)


@block("linear", 4, _one_of(*_ACTS))
def _linear(clock: Clock, act: str) -> nn.Module:
    return nn.Sequential(nn.Linear(COLUMNS, COLUMNS), _ACTS[act]())


class _Convolution(nn.Module):
    def __init__(self, norm: str) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4) if norm == "batch" else nn.GroupNorm(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.norm(self.conv(x.reshape(2, 4, 2, 2))).relu().reshape(ROWS, COLUMNS)
        return found


@block("conv", 1.5, _one_of("batch", "group"))
def _conv(clock: Clock, norm: str) -> nn.Module:
    return _Convolution(norm)


@block("norm", 1.5, _one_of("layer", "rms", "batch"))
def _norm(clock: Clock, kind: str) -> nn.Module:
    return {"layer": nn.LayerNorm, "rms": nn.RMSNorm, "batch": nn.BatchNorm1d}[kind](COLUMNS)


class _Embedding(nn.Module):
    """Looks up rows by the batch's values. `tied`: the same weight is the head."""

    def __init__(
        self, max_norm: float | None, padding: int | None, by_frequency: bool, tied: bool, sparse: bool
    ) -> None:
        super().__init__()
        self.table = nn.Embedding(
            10, COLUMNS, padding, max_norm, scale_grad_by_freq=by_frequency, sparse=sparse and not tied
        )
        self.tied = tied

    def forward(self, x: Tensor) -> Tensor:
        rows = (x.detach()[:, :2] * 4).abs().long().clamp(0, 9)
        found: Tensor = x + self.table(rows).mean(1)
        if self.tied:
            found = found + (found @ self.table.weight.t()).softmax(-1)[:, :COLUMNS]
        return found


def _draw_embedding(random: Random) -> tuple[Any, ...]:
    return (
        random.choice([None, 0.7, 1.5]),
        random.choice([None, 0]),
        random.random() < 0.3,
        random.random() < 0.4,
        random.random() < 0.08,
    )


@block("embedding", 2, _draw_embedding)
def _embedding(clock: Clock, *how: Any) -> nn.Module:
    return _Embedding(*how)


class _Tied(nn.Module):
    def __init__(self, turned: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(COLUMNS, COLUMNS), nn.Linear(COLUMNS, COLUMNS)
        self.second.weight = self.first.weight
        self.turned = turned

    def forward(self, x: Tensor) -> Tensor:
        if self.turned:
            return nn.functional.linear(self.first(x).tanh(), self.second.weight.t(), self.second.bias)
        found: Tensor = self.second(self.first(x).tanh())
        return found


@block("tied", 1.2, lambda random: (random.random() < 0.4,))
def _tied(clock: Clock, turned: bool) -> nn.Module:
    return _Tied(turned)


class _Scaled(nn.Module):
    """A parametrization that also writes to a buffer of its own."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.ones(()))

    def forward(self, weight: Tensor) -> Tensor:
        with torch.no_grad():
            self.calls.add_(0.125)
        return weight * self.calls


def _parametrized(kind: str) -> nn.Module:
    linear = nn.Linear(COLUMNS, COLUMNS)
    if kind == "weight":
        return parametrizations.weight_norm(linear)
    if kind == "old weight":
        return torch.nn.utils.weight_norm(linear)
    if kind == "spectral":
        return parametrizations.spectral_norm(linear)
    if kind == "old spectral":
        return torch.nn.utils.spectral_norm(linear)
    if kind == "orthogonal":
        return parametrizations.orthogonal(linear)
    parametrize.register_parametrization(linear, "weight", _Scaled())
    return linear


@block("parametrized", 2, _one_of("weight", "old weight", "spectral", "old spectral", "orthogonal", "scaled"))
def _of_parametrizations(clock: Clock, kind: str) -> nn.Module:
    return _parametrized(kind)


class _Adapted(nn.Module):
    """A frozen base, as it is or quantized, with a trained adapter of low rank."""

    def __init__(self, quantized: bool) -> None:
        super().__init__()
        self.base = nn.Linear(COLUMNS, COLUMNS).requires_grad_(False)
        if quantized:
            codes = (self.base.weight.detach() * 100).round().to(torch.int8)
            del self.base.weight
            self.base.codes = nn.Parameter(codes, requires_grad=False)
        self.down, self.up = nn.Linear(COLUMNS, 2, bias=False), nn.Linear(2, COLUMNS, bias=False)
        self.quantized = quantized

    def forward(self, x: Tensor) -> Tensor:
        if self.quantized:
            codes: Any = self.base.codes
            weight = codes.float() * 0.01
            found: Tensor = nn.functional.linear(x, weight, self.base.bias)
        else:
            found = self.base(x)
        return found.tanh() + self.up(self.down(x))


@block("adapted", 2, lambda random: (random.random() < 0.3,))
def _adapted(clock: Clock, quantized: bool) -> nn.Module:
    return _Adapted(quantized)


class _Encoder(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(COLUMNS, 2, 16, dropout, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x.reshape(2, 2, COLUMNS)).reshape(ROWS, COLUMNS)
        return found


@block("transformer", 0.8, _one_of(0.0, 0.2))
def _transformer(clock: Clock, dropout: float) -> nn.Module:
    return _Encoder(dropout)


class _Twice(nn.Module):
    """Calls one layer twice, or lists one layer under two names."""

    def __init__(self, named: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(COLUMNS, COLUMNS)
        if named:
            self.again = self.layer

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = getattr(self, "again", self.layer)(self.layer(x).tanh())
        return found


@block("twice", 1, lambda random: (random.random() < 0.3,))
def _twice(clock: Clock, named: bool) -> nn.Module:
    return _Twice(named)


class _Checkpointed(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(COLUMNS, COLUMNS), nn.Tanh(), nn.Linear(COLUMNS, COLUMNS))
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        given: dict[str, Any] = {"context_fn": _selective} if self.how == "selective" else {}
        found: Tensor = checkpoint.checkpoint(self.inner, x, use_reentrant=self.how == "reentrant", **given)
        return found


def _selective() -> Any:
    """Keeps the results of matrix products."""
    return checkpoint.create_selective_checkpoint_contexts([torch.ops.aten.addmm.default])


@block("checkpointed", 1, _one_of("reentrant", "not reentrant", "selective"))
def _checkpointed(clock: Clock, how: str) -> nn.Module:
    return _Checkpointed(how)


WRITES = ("no_grad", "detach", "data", "copy_", "numpy", "optimizer")


def write(tensor: Tensor, how: str, amount: float) -> None:
    """Writes to a parameter or a buffer. All ways give other values each time."""
    if how == "no_grad":
        with torch.no_grad():
            tensor.clamp_(-1, 1).mul_(1 + amount)
    elif how == "detach":
        tensor.detach().mul_(1 - amount)
    elif how == "data":
        tensor.data.add_(amount)
    elif how == "numpy":
        array = tensor.detach().numpy()
        array += array.dtype.type(amount)
    elif how == "optimizer" and isinstance(tensor, nn.Parameter):
        before = tensor.grad
        tensor.grad = torch.full_like(tensor, amount)
        torch.optim.SGD([tensor], lr=0.5).step()
        tensor.grad = before
    else:
        with torch.no_grad():
            tensor.copy_(tensor * (1 - amount) + amount)


class _Writing(nn.Module):
    """Writes to its weight, its child's weight or a buffer as it runs, ahead of the use of them or behind it."""

    scale: Tensor

    def __init__(self, clock: Clock, how: str, what: str, first: int, is_ahead: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(COLUMNS, COLUMNS) * 0.4)
        self.child = nn.Linear(COLUMNS, COLUMNS)
        self.register_buffer("scale", torch.ones(COLUMNS))
        self.clock, self.how, self.what, self.first, self.is_ahead = clock, how, what, first, is_ahead

    def forward(self, x: Tensor) -> Tensor:
        if self.is_ahead:
            self._write()
        x = self.child((x * self.scale) @ self.weight)
        if not self.is_ahead:
            self._write()
        return x

    def _write(self) -> None:
        if not self.training or self.clock.step < self.first:
            return
        found: Any = {"own": self.weight, "child": self.child.weight, "buffer": self.scale}[self.what]
        write(found, self.how, 0.03 * (1 + self.clock.step))


def _draw_writing(random: Random) -> tuple[Any, ...]:
    is_ahead = random.random() < 0.7
    # Behind its use the memory is saved for the backward: plain PyTorch refuses a write that it sees.
    how = random.choice(WRITES) if is_ahead else "no_grad"
    what = random.choice(["own", "child", "buffer"])
    return how, what, random.choice([0, 0, 1, 3, 4]), is_ahead


@block("writing", 2.5, _draw_writing)
def _writing(clock: Clock, *how: Any) -> nn.Module:
    return _Writing(clock, *how)


class _Momentum(nn.Module):
    """A trained layer, and a frozen one that follows it, as in MoCo and BYOL."""

    def __init__(self, clock: Clock, first: int, how: str) -> None:
        super().__init__()
        self.online, self.target = nn.Linear(COLUMNS, COLUMNS), nn.Linear(COLUMNS, COLUMNS)
        self.target.load_state_dict(self.online.state_dict())
        self.target.requires_grad_(False)
        self.clock, self.first, self.how = clock, first, how

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.online(x)
        if self.training and self.clock.step >= self.first:
            self._follow()
        with torch.no_grad():
            wanted: Tensor = self.target(x)
        return found * 0.7 + (wanted - found).square()

    @torch.no_grad()
    def _follow(self) -> None:
        pairs = list(zip(self.online.parameters(), self.target.parameters(), strict=True))
        if self.how == "foreach":
            torch._foreach_lerp_([to for _, to in pairs], [source for source, _ in pairs], 0.3)
            return
        for source, to in pairs:
            if self.how == "data":
                to.data = to.data * 0.7 + source.data * 0.3
            elif self.how == "copy":
                to.copy_(to * 0.7 + source * 0.3)
            else:
                to.mul_(0.7).add_(source, alpha=0.3)


@block("momentum", 1.5, lambda random: (random.choice([0, 0, 2, 3]), random.choice(["foreach", "copy", "mul", "data"])))
def _momentum(clock: Clock, first: int, how: str) -> nn.Module:
    return _Momentum(clock, first, how)


class _Outside(nn.Module):
    """Uses the weight of its child outside of the child's call: by a function, for a penalty, or frozen."""

    def __init__(self, clock: Clock, how: str, first: int) -> None:
        super().__init__()
        self.child = nn.Linear(COLUMNS, COLUMNS)
        self.clock, self.how, self.first = clock, how, first

    def forward(self, x: Tensor) -> Tensor:
        weight = self.child.weight
        if self.clock.step < self.first:
            weight = weight.detach()
        if self.how == "function":
            return nn.functional.linear(x, weight)
        if self.how == "penalty":
            x = x + 0.1 * weight.square().mean()
        if self.how == "transposed":
            x = x @ weight.t()
        found: Tensor = self.child(x)
        return found


@block("outside", 1, lambda random: (random.choice(["function", "penalty", "transposed"]), random.choice([0, 0, 0, 3])))
def _outside(clock: Clock, how: str, first: int) -> nn.Module:
    return _Outside(clock, how, first)


class _Greedy(nn.Module):
    """Trains its layer by a loss of its own in a forward hook, and hands on a detached result (forward-forward)."""

    def __init__(self, clock: Clock, kind: str) -> None:
        super().__init__()
        self.layer = nn.Linear(COLUMNS, COLUMNS)
        made = torch.optim.Adam if kind == "adam" else torch.optim.SGD
        self.optimizer = made(self.layer.parameters(), lr=0.05)
        self.layer.register_forward_hook(self._trained)

    def _trained(self, layer: nn.Module, args: Any, output: Tensor) -> Tensor:
        if not torch.is_grad_enabled() or not output.requires_grad:
            return output
        self.optimizer.zero_grad()
        output.square().mean().backward()
        self.optimizer.step()
        return output.detach()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x.detach())


@block("greedy", 0.7, _one_of("adam", "sgd"))
def _greedy(clock: Clock, kind: str) -> nn.Module:
    return _Greedy(clock, kind)


class _Sometimes(nn.Module):
    """Has one layer that runs in a part of the steps only, and one that never runs."""

    def __init__(self, clock: Clock, period: int, first: int) -> None:
        super().__init__()
        self.layer, self.unused = nn.Linear(COLUMNS, COLUMNS), nn.Linear(2, 3)
        self.clock, self.period, self.first = clock, period, first

    def forward(self, x: Tensor) -> Tensor:
        runs = self.clock.step >= self.first and self.clock.step % self.period == 0
        return x + self.layer(x) if runs else x * 0.9


@block("sometimes", 1, lambda random: (random.choice([1, 2, 3]), random.choice([0, 0, 3])))
def _sometimes(clock: Clock, period: int, first: int) -> nn.Module:
    return _Sometimes(clock, period, first)


class _Functional(nn.Module):
    """Calls its child with parameters that it is given, or takes a gradient by torch.func."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.child = nn.Linear(COLUMNS, COLUMNS)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        parameters: dict[str, Tensor] = dict(self.child.named_parameters())
        if self.how == "grad":

            def loss(own: dict[str, Tensor]) -> Tensor:
                made: Tensor = torch.func.functional_call(self.child, own, (x.detach(),))
                return made.square().mean()

            slopes = torch.func.grad(loss)(parameters)
            x = x + slopes["bias"].detach()
        elif self.how == "halved":
            parameters = {name: one * 0.5 for name, one in parameters.items()}
        found: Tensor = torch.func.functional_call(self.child, parameters, (x,))
        return found


@block("functional", 0.5, _one_of("given", "halved", "grad"))
def _functional(clock: Clock, how: str) -> nn.Module:
    return _Functional(how)


class _Initialized(nn.Module):
    """Initializes its scale and shift from the data of one call, as ActNorm does."""

    def __init__(self, clock: Clock, first: int, how: str) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(COLUMNS)), nn.Parameter(torch.zeros(COLUMNS))
        self.clock, self.first, self.how = clock, first, how

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.clock.step == self.first:
            scale, shift = 1 / (x.detach().std(0) + 0.1), -x.detach().mean(0)
            if self.how == "data":
                self.scale.data.copy_(scale)
                self.shift.data.copy_(shift)
            else:
                with torch.no_grad():
                    self.scale.copy_(scale)
                    self.shift.copy_(shift)
        return x * self.scale + self.shift


@block("initialized", 0.7, lambda random: (random.choice([0, 3]), random.choice(["data", "copy"])))
def _initialized(clock: Clock, first: int, how: str) -> nn.Module:
    return _Initialized(clock, first, how)


@block("frozen", 1.2, _one_of(*_ACTS))
def _frozen(clock: Clock, act: str) -> nn.Module:
    return nn.Sequential(nn.Linear(COLUMNS, COLUMNS), _ACTS[act]()).requires_grad_(False)


@block("recurrent", 0.2)
def _recurrent(clock: Clock) -> nn.Module:
    return _Recurrent()


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(COLUMNS, COLUMNS)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.cell(x, self.cell(x))
        return found
