"""Random compiled regions: small modules under torch.compile with a budget, against plain PyTorch.

A program is a list of blocks, which write to parameters and buffers ahead of and behind their uses, draw random
numbers, view and overwrite values, checkpoint parts and return several outputs. The mode is the budget: the least that
a region can have, halfway to what it likes, or that. Torch's own aot_eager differs from plain PyTorch in the last bits
of some operations and in some writes: where it has the same numbers as ours, the difference is torch's, and the verdict
says so.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import BackendCompilerFailed
from torch.utils.checkpoint import checkpoint

from tests.fuzz.outcomes import Kind, Verdict, apart, message_of
from tests.fuzz.program import ALWAYS, Program, Statement
from tests.fuzz.shapes import COLUMNS, ROWS
from tests.fuzz.trainings.world import Trace, bits
from vdnn.hardware import load_profile
from vdnn.integrations.compile_options import BudgetPartitioner

Tensor = torch.Tensor
STEPS = 3
BUDGETS = ("least", "least", "half", "ample")
MODES = tuple(f"{budget}, {kind}" for budget in dict.fromkeys(BUDGETS) for kind in ("offloads", "recomputes"))
_ENOUGH = 2**40


# Blocks.

Write = Callable[[Tensor], object]
WRITES: dict[str, Write] = {
    "mul": lambda tensor: tensor.mul_(0.9),
    "clamp": lambda tensor: tensor.clamp_(-0.3, 0.3),
    "copy": lambda tensor: tensor.copy_(tensor * 0.8 + 0.01),
    "part": lambda tensor: tensor[:2].add_(0.05),
    "twice": lambda tensor: tensor.mul_(1.1).sub_(0.01),
}


class Linear(nn.Module):
    def __init__(self, act: str) -> None:
        super().__init__()
        self.inner, self.act = nn.Linear(COLUMNS, COLUMNS), getattr(torch, act)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.act(self.inner(x))
        return found


class Written(nn.Module):
    """Writes to a parameter or buffer under no_grad: ahead of its use, behind it, or between two uses."""

    scale: Tensor

    def __init__(self, what: str, how: str, place: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(COLUMNS, COLUMNS) * 0.3)
        self.frozen = nn.Parameter(torch.randn(COLUMNS, COLUMNS) * 0.3, requires_grad=False)
        self.register_buffer("scale", torch.rand(COLUMNS) + 0.5)
        self.what, self.how, self.place = what, how, place

    def forward(self, x: Tensor) -> Tensor:
        written: Tensor = getattr(self, self.what)
        if self.place != "behind":
            with torch.no_grad():
                WRITES[self.how](written)
        if self.place == "between":
            x = x + (written * 0.5).sum()
            with torch.no_grad():
                WRITES[self.how](written)
        x = (x * self.scale.square()).tanh() @ self.weight
        x = (x.sigmoid() @ self.frozen.exp()).sin()
        if self.place == "behind":
            with torch.no_grad():
                WRITES[self.how](self.scale if self.what == "weight" else written)
        return x


class Momentum(nn.Module):
    """A frozen layer that follows a trained one in the forward."""

    def __init__(self, is_ahead: bool) -> None:
        super().__init__()
        self.online, self.target = nn.Linear(COLUMNS, COLUMNS), nn.Linear(COLUMNS, COLUMNS)
        self.target.requires_grad_(False)
        self.is_ahead = is_ahead

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.online(x)
        if self.is_ahead:
            self._follow()
        wanted = self.target(x).tanh()
        if not self.is_ahead:
            self._follow()
        return found * 0.7 + (wanted - found).square()

    def _follow(self) -> None:
        with torch.no_grad():
            for source, to in zip(self.online.parameters(), self.target.parameters(), strict=True):
                to.mul_(0.7).add_(source, alpha=0.3)


class Counted(nn.Module):
    """Counts its calls in a buffer, and uses the count."""

    calls: Tensor

    def __init__(self, is_ahead: bool) -> None:
        super().__init__()
        self.register_buffer("calls", torch.ones(()))
        self.is_ahead = is_ahead

    def forward(self, x: Tensor) -> Tensor:
        if self.is_ahead:
            self.calls += 1
        return (x * self.calls).tanh() * self.calls.exp()


class Norm(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.norm = {"batch": nn.BatchNorm1d, "layer": nn.LayerNorm, "rms": nn.RMSNorm}[kind](COLUMNS)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.norm(x)
        return found


class Dropout(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "dropout":
            return nn.functional.dropout(x, 0.3, self.training)
        if self.how == "rand":
            return x * torch.rand_like(x)
        return x + torch.randn_like(x).square() * x.exp()


class Views(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "chunk":
            first, second = x.chunk(2, -1)
            return torch.cat([first.sigmoid() * second, second.tanh()], -1)
        if self.how == "transpose":
            return (x.t().contiguous().sin().t() * x).contiguous()
        if self.how == "flat":
            return x.reshape(-1).softmax(0).view_as(x) + x
        return x.as_strided((ROWS, COLUMNS), (COLUMNS, 1)).exp().clamp(max=3)


class InPlace(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        made = x.sin() * 1.5
        if self.how == "view":
            made[1:3].mul_(0.5)
        elif self.how == "relu":
            made.relu_()
        elif self.how == "index":
            made[:, 0] = x[:, 1].exp()
        else:
            made.add_(x.square()).mul_(0.7)
        return made * x


class Checkpointed(nn.Module):
    def __init__(self, *inner: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Sequential(*inner)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return found


class Whole(nn.Module):
    """Blocks one behind the other. Returns the last value, and those behind `kept`. `writes_input`: scales its second
    input in place."""

    def __init__(self, blocks: list[nn.Module], kept: tuple[int, ...], writes_input: str) -> None:
        super().__init__()
        self.blocks, self.kept, self.writes_input = nn.ModuleList(blocks), kept, writes_input

    def forward(self, x: Tensor, given: Tensor) -> list[Tensor]:
        found = []
        if self.writes_input == "ahead":
            given.mul_(0.5)
        x = x * given.cos()
        for index, block in enumerate(self.blocks):
            x = block(x)
            if index in self.kept:
                found.append(x.sum(-1) if index % 2 else x)
        if self.writes_input == "behind":
            given.add_(1)
        return [x, *found]


BLOCKS: dict[str, tuple[float, Callable[[Random], tuple[Any, ...]], Callable[..., nn.Module]]] = {
    "linear": (2, lambda random: (random.choice(["relu", "tanh", "sin", "sigmoid"]),), Linear),
    "written": (
        4,
        lambda random: (
            random.choice(["weight", "frozen", "scale"]),
            random.choice(list(WRITES)),
            random.choice(["ahead", "ahead", "behind", "between"]),
        ),
        Written,
    ),
    "momentum": (1.5, lambda random: (random.random() < 0.6,), Momentum),
    "counted": (1, lambda random: (random.random() < 0.7,), Counted),
    "norm": (1, lambda random: (random.choice(["batch", "layer", "rms"]),), Norm),
    "dropout": (0.7, lambda random: (random.choice(["dropout", "rand", "randn"]),), Dropout),
    "views": (1, lambda random: (random.choice(["chunk", "transpose", "flat", "strided"]),), Views),
    "in_place": (1, lambda random: (random.choice(["view", "relu", "index", "both"]),), InPlace),
}
_PURE = ("linear", "dropout", "views", "in_place")


# Programs.


def program_of(seed: int, mode: str | None = None) -> Program:
    random = Random(seed)
    drawn = f"{random.choice(BUDGETS)}, {random.choice(['offloads', 'recomputes'])}"
    body = [_block(random) for _ in range(random.randint(1, 5))]
    if random.random() < 0.3:
        inner = tuple(_block(random, in_checkpoint=True) for _ in range(random.randint(1, 2)))
        body.insert(random.randint(0, len(body)), Statement("checkpointed", body=inner))
    kept = tuple(index for index in range(len(body)) if random.random() < 0.2)
    writes = random.choice(["", "", "", "ahead", "behind"])
    return Program(seed, mode or drawn, (Statement("whole", -1, (), (kept, writes), ALWAYS, tuple(body)),))


def _block(random: Random, *, in_checkpoint: bool = False) -> Statement:
    """In a checkpoint nothing is written to: plain PyTorch writes again as it recomputes."""
    names = list(_PURE if in_checkpoint else BLOCKS)
    name = random.choices(names, [BLOCKS[one][0] for one in names])[0]
    return Statement(name, args=BLOCKS[name][1](random))


def _made(statement: Statement) -> nn.Module:
    if statement.name == "checkpointed":
        return Checkpointed(*map(_made, statement.body))
    return BLOCKS[statement.name][2](*statement.args)


def model_of(program: Program) -> nn.Module:
    (whole,) = program.body
    torch.manual_seed(program.seed)
    return Whole(list(map(_made, whole.body)), *whole.args)


# Runs.


def _trace_of(program: Program, compiled: Callable[[nn.Module], Any]) -> Trace:
    """All that a training of a few steps shows."""
    model = model_of(program)
    run = compiled(model)
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad] or [torch.zeros(1)], lr=0.05)
    generator = torch.Generator().manual_seed(program.seed)
    trace: Trace = []
    for step in range(STEPS):
        x = torch.randn(ROWS, COLUMNS, generator=generator).requires_grad_()
        given = torch.randn(ROWS, COLUMNS, generator=generator)
        torch.manual_seed(step)
        found = run(x, given)
        loss = sum((one.square().mean() for one in found[1:]), found[0].square().mean())
        loss.backward()
        trace += [(f"{step}: output {index}", bits(one)) for index, one in enumerate(found)]
        trace += [(f"{step}: input {index}", bits(one)) for index, one in enumerate((x, given))]
        trace.append((f"{step}: gradient of the input", None if x.grad is None else bits(x.grad)))
        trace += [(f"{step}: gradient {name}", _bits(one.grad)) for name, one in model.named_parameters()]
        optimizer.step()
        optimizer.zero_grad()
        trace += [(f"{step}: {name}", bits(one)) for name, one in model.state_dict().items()]
    return trace


def _bits(tensor: Tensor | None) -> bytes | None:
    return None if tensor is None else bits(tensor)


def _as_it_is(module: torch.fx.GraphModule, _inputs: object) -> Callable[..., Any]:
    """Runs a graph without compiling it, as torch's backend aot_eager does."""

    def run(arguments: list[Any]) -> Any:
        return module.forward(*arguments)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _compiled(model: nn.Module, **options: Any) -> Any:
    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=_as_it_is, keep_inference_input_mutations=True, **options)
    return torch.compile(model, backend=backend)


def _under(program: Program, budget: int) -> tuple[Trace, BudgetPartitioner]:
    offloads = program.mode.endswith("offloads")
    partitioner = BudgetPartitioner(budget, load_profile("h100"), offloads=offloads)
    return _trace_of(program, functools.partial(_compiled, partition_fn=partitioner)), partitioner


def _least(program: Program) -> tuple[Trace, int]:
    """The trace under the least budget, as the refusals name it, and that budget."""
    budget = 1
    while True:
        try:
            return _under(program, budget)[0], budget
        except BackendCompilerFailed as error:
            said = re.search(r"at least .*? \((\d+) bytes\)", str(error))
            if said is None or int(said[1]) <= budget:
                raise
            budget = int(said[1])


@contextmanager
def _without_caches() -> Iterator[None]:
    inductor, functorch = torch._inductor.config, torch._functorch.config
    with inductor.patch(fx_graph_cache=False, compile_threads=1), functorch.patch(enable_autograd_cache=False):
        try:
            yield
        finally:
            torch._dynamo.reset()


def _ours(program: Program) -> Trace:
    budget = program.mode.split(",")[0]
    if budget == "least":
        return _least(program)[0]
    trace, partitioner = _under(program, _ENOUGH)
    if budget == "ample":
        return trace
    most = max((one.peak_bytes for one in partitioner.regions), default=1)
    return _under(program, (most + _least(program)[1]) // 2)[0]


def verdict_of(program: Program) -> Verdict:
    """Plain PyTorch first, then torch.compile under the budget, and torch's own aot_eager where the two differ."""
    with _without_caches():
        try:
            plain = _trace_of(program, lambda model: model)
        except Exception as error:
            return Verdict(Kind.SAME, what=f"plain {message_of(error)}")
        try:
            ours = _ours(program)
        except Exception as error:
            try:
                _trace_of(program, _compiled)
            except Exception as same:
                return Verdict(Kind.LOST, what=f"torch's own {message_of(same)}")
            return Verdict(Kind.DIFFERENT, what=f"plain has no error, ours {message_of(error)}")
        found = _difference(plain, ours)
        if found is None:
            return Verdict(Kind.SAME)
        torchs = _trace_of(program, _compiled)
        if _difference(torchs, ours) is None:
            return Verdict(Kind.LOST, what=f"torch's own: {found}")
        return Verdict(Kind.DIFFERENT, what=f"{found}; torch's own: {_difference(plain, torchs)}")


def _difference(plain: Trace, ours: Trace) -> str | None:
    for (label, wanted), (other, found) in zip(plain, ours, strict=True):
        if label != other or wanted != found:
            return f"{label}: {apart(wanted, found)}"
    return None
