"""A rehearsal runs one step where one before it would leave gradients and optimizer state alone, and finds the same."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from vdnn.hardware import load_profile
from vdnn.planning.costs import profile_costs
from vdnn.planning.least_memory import least_bytes
from vdnn.planning.planned_step import plan_step
from vdnn.runtime.rehearsal.made_warm_up import MadeWarmUp
from vdnn.runtime.rehearsal.rehearsal import Rehearsal, rehearse, subject_of
from vdnn.step.plan import Plan

WIDTH = 64
H100 = load_profile("h100")
steps: list[str] = []  # the programs that ran, a name for each step


class Program(nn.Module):
    """A program whose step leaves nothing behind, unless `leaves` does."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.words, self.into, self.out = nn.Embedding(100, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 100)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        steps.append(self.name)
        x = self.norm(functional.dropout(functional.gelu(self.into(self.words(words))), 0.1))
        return self.out(x + self.leaves(x))  # type: ignore[no-any-return]

    def leaves(self, x: torch.Tensor) -> torch.Tensor | float:
        return 0.0


class Uncalled(Program):
    """Multiplies by the weight of a module that it never calls, and never uses its bias, as Mamba does."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.mixes = nn.Linear(WIDTH, WIDTH)

    def leaves(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.mixes.weight.T)


class Adapted(Program):
    """Trains two small matrices beside frozen ones."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def leaves(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(self.down(x))  # type: ignore[no-any-return]


class FrozenUsedFirst(Program):
    """Uses the frozen weight of a module before it calls the module: a session does not know it as a parameter yet."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.mixes = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)

    def leaves(self, x: torch.Tensor) -> torch.Tensor:
        return self.mixes(x * self.mixes.weight.view(-1)[:WIDTH])  # type: ignore[no-any-return]


class Normalized(Program):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.batches = nn.BatchNorm1d(WIDTH)

    def leaves(self, x: torch.Tensor) -> torch.Tensor:
        return self.batches(x.flatten(0, 1)).view_as(x)  # type: ignore[no-any-return]


class Averaged(Program):
    """Writes to a tensor that it does not register."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.mean = torch.zeros(WIDTH)

    def leaves(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.lerp_(x.detach().mean((0, 1)), 0.1)
        return x * self.mean.clone()


class Cached(Program):
    """Makes a table in its first step."""

    table: torch.Tensor | None = None

    def leaves(self, x: torch.Tensor) -> torch.Tensor:
        if self.table is None:
            self.table = torch.outer(torch.arange(float(x.shape[1])), torch.ones(WIDTH))
        return x * self.table


class Drawing(Program):
    def leaves(self, x: torch.Tensor) -> torch.Tensor:
        return x.tanh() if random.random() < 0.5 else x.sigmoid()


LEAVES_NOTHING = {"plain": Program, "adapted": Adapted}
# The steps of a rehearsal: one that finds what the made warm-up lacked, and the one that counts.
UNUSED_PARAMETER = {"uncalled": Uncalled}
WARMS_UP = {"normalized": Normalized}  # at once
# One that finds what was left, and two with a warm-up.
LEAVES = {"averaged": Averaged, "cached": Cached, "drawing": Drawing, "frozen, used first": FrozenUsedFirst}
STEPS = {
    **dict.fromkeys(LEAVES_NOTHING, 1),
    **dict.fromkeys(UNUSED_PARAMETER, 2),
    **dict.fromkeys(WARMS_UP, 2),
    **dict.fromkeys(LEAVES, 3),
}
PROGRAMS: dict[str, Callable[[str], Program]] = {**LEAVES_NOTHING, **UNUSED_PARAMETER, **WARMS_UP, **LEAVES}


def rehearsed(
    name: str, plan: Plan | None = None, optimizer: str | None = None, after: Rehearsal | None = None
) -> Rehearsal:
    steps.clear()
    subject = subject_of(lambda batch: (PROGRAMS[name](name), torch.zeros(batch, 12, dtype=torch.int64)), 8)
    return rehearse(subject, H100, plan=plan, optimizer=optimizer, min_bytes=0, after=after)


def half_way(recorded: Rehearsal) -> Plan:
    least, most = least_bytes(recorded.recording), recorded.recording.peak_bytes
    return plan_step(recorded.recording, profile_costs(H100), (least + most) // 2).plan


@pytest.mark.parametrize("optimizer", [None, "sgd", "adamw"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_rehearsal_finds_what_it_finds_after_a_warm_up(
    name: str, optimizer: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = rehearsed(name, optimizer=optimizer)
    plan = half_way(found)
    run = rehearsed(name, plan, optimizer, found)
    monkeypatch.setattr(MadeWarmUp, "suits", lambda staged: False)
    assert found == rehearsed(name, optimizer=optimizer)
    assert run == rehearsed(name, plan, optimizer)
    assert len(steps) == 2


@pytest.mark.parametrize("optimizer", [None, "adamw"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_no_step_runs_that_leaves_only_what_can_be_made(name: str, optimizer: str | None) -> None:
    recorded = rehearsed(name, optimizer=optimizer)
    assert len(steps) == STEPS[name]
    # A rehearsal after another one knows whether a step has to warm up. One has to where the optimizer makes its state:
    # its places in an allocator's segments are those of a step that ran.
    rehearsed(name, half_way(recorded), optimizer, recorded)
    assert len(steps) == (1 if optimizer is None and recorded.unused is not None else 2)


def test_a_program_with_a_step_of_its_own_warms_up() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.model = Program("own")

        def step(self) -> None:
            self.model(torch.zeros(8, 12, dtype=torch.int64)).sum().backward()

    steps.clear()
    rehearse(subject_of(lambda batch: Trainer(), 8), H100, min_bytes=0)
    assert len(steps) == 2


def test_a_failed_step_leaves_no_hook() -> None:
    class Failing(Program):
        def leaves(self, x: torch.Tensor) -> Any:
            raise ValueError("the step fails")

    hooks = torch.nn.modules.module._global_forward_pre_hooks
    before = dict(hooks)
    with pytest.raises(Exception, match="the step fails"):
        rehearse(subject_of(lambda batch: (Failing("failing"), torch.zeros(batch, 12, dtype=torch.int64)), 8), H100)
    assert dict(hooks) == before
