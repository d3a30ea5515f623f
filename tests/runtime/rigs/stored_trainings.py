"""Small trainings under a budget and with a plan folder, for tests of plans that outlive a process.

As a program it runs all of them, or those that are named, and prints, as JSON, what each took:
`python -m tests.runtime.rigs.stored_trainings FOLDER [NAME ...]`.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

import vdnn
from tests.runtime.rigs.networks import images, small_resnet
from vdnn.runtime.machine.virtual_machine import VirtualMachine
from vdnn.runtime.session.session import Session
from vdnn.runtime.steps.planner import BudgetPlanner

WIDTH, WORDS = 32, 50


class Block(nn.Module):
    """A block of a decoder, as GPT-2 or as Llama has it."""

    def __init__(self, *, is_llama: bool) -> None:
        super().__init__()
        norm, inner = (nn.RMSNorm, 2 * WIDTH) if is_llama else (nn.LayerNorm, 4 * WIDTH)
        self.norms = nn.ModuleList(norm(WIDTH) for _ in range(2))
        self.projected = nn.Linear(WIDTH, 3 * WIDTH)
        self.mixed = nn.Linear(WIDTH, WIDTH)
        self.gate = nn.Linear(WIDTH, inner, bias=False) if is_llama else None
        self.up, self.down = nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            one.unflatten(-1, (2, -1)).transpose(1, 2) for one in self.projected(self.norms[0](x)).chunk(3, -1)
        )
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.mixed(attended.transpose(1, 2).flatten(2))
        normed = self.norms[1](x)
        up = self.up(normed)
        if self.gate is None:
            inner = functional.gelu(up, approximate="tanh")
        else:
            inner = functional.silu(self.gate(normed)) * up
        out: torch.Tensor = x + self.down(inner)
        return out


class Decoder(nn.Module):
    """A language model."""

    def __init__(self, *, is_llama: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.Sequential(*(Block(is_llama=is_llama) for _ in range(3)))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.blocks(self.embedding(words)))
        return logits


class Training(NamedTuple):
    """`batches` are the sizes of the steps; `share` is the budget as a share of plain's peak."""

    make: Callable[[], nn.Module]
    batches: tuple[int, ...]
    share: float


TRAININGS = {
    "gpt-2": Training(Decoder, (32,) * 5, 0.5),
    "llama": Training(lambda: Decoder(is_llama=True), (32,) * 5, 0.45),
    "resnet": Training(lambda: small_resnet(8), (16,) * 5, 0.6),
    "lengths": Training(Decoder, (24, 32, 16, 40, 32, 28, 24, 40), 0.5),
}


class Ran(NamedTuple):
    """A run of a training: the peak of each step, a hash of all losses and gradients, and what the session did."""

    peaks: list[int]
    numbers: str
    plans_made: int = 0  # calls of the planner
    made_in_first: int = 0  # of these in the first step
    recorded: int = 0
    report: str = ""


def loss_of(model: nn.Module, size: int) -> torch.Tensor:
    if not isinstance(model, Decoder):
        out: torch.Tensor = model(images(size, 16)).square().mean()
        return out
    words = torch.randint(0, WORDS, (4, size))
    return functional.cross_entropy(model(words).flatten(0, 1), words.flatten())


def trained(training: Training, machine: VirtualMachine, session: Session | None, calls: list[int]) -> Ran:
    """Trains inside the session, if there is one. `calls` counts those of the planner."""
    torch.manual_seed(0)
    model = training.make()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    peaks, numbers, made_in_first = [], hashlib.sha256(), 0
    for size in training.batches:
        machine.reset_peak()
        loss = loss_of(model, size)
        loss.backward()
        for tensor in (loss.detach(), *(one.grad for one in model.parameters())):
            numbers.update(b"" if tensor is None else tensor.numpy().tobytes())
        del loss
        optimizer.step()
        optimizer.zero_grad()
        peaks.append(machine.peak_bytes)
        made_in_first = made_in_first or len(calls) * (len(peaks) == 1)
    use = None if session is None else session._engine.steps.plan_use
    recorded = 0 if use is None else use.recorded
    report = "" if session is None else session.report()
    return Ran(peaks, numbers.hexdigest(), len(calls), made_in_first, recorded, report)


def plain(training: Training) -> Ran:
    with VirtualMachine("h100", fake=False) as machine:
        return trained(training, machine, None, [])


def under_budget(training: Training, budget_bytes: int, folder: Path, **options: Any) -> Ran:
    calls: list[int] = []
    planned = BudgetPlanner.planned

    def counted(self: BudgetPlanner, *args: Any, **named: Any) -> Any:
        calls.append(1)
        return planned(self, *args, **named)

    BudgetPlanner.planned = counted  # type: ignore[method-assign]
    try:
        with VirtualMachine("h100", fake=False) as machine:
            session = vdnn.offload(budget=budget_bytes, device=machine, min_bytes=256, plans=folder, **options)
            with session:
                return trained(training, machine, session, calls)
    finally:
        BudgetPlanner.planned = planned  # type: ignore[method-assign]


def main() -> None:
    folder = Path(sys.argv[1])
    found = {}
    for name in sys.argv[2:] or TRAININGS:
        training = TRAININGS[name]
        alone = plain(training)
        budget_bytes = int(training.share * max(alone.peaks))
        ran = under_budget(training, budget_bytes, folder)
        found[name] = {"plain": alone._asdict(), "budget_bytes": budget_bytes, "vdnn": ran._asdict()}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
