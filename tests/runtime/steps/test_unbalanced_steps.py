"""Steps whose sizes differ from their plan's in some places only: experts that get more or fewer tokens in each step.

What is larger than planned is balanced with what is smaller, within the budget, and the result is that of plain torch.
"""

from __future__ import annotations

import contextlib
import random
from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

import vdnn
from vdnn.planning.footprint import offload_everything, stored_bytes
from vdnn.runtime.machine.virtual_machine import VirtualMachine
from vdnn.runtime.session.session import Session
from vdnn.step.made_steps import live_bytes, with_recomputes_of
from vdnn.step.plan import Action, PlannedLifetime

WIDTH, TOKENS, EXPERTS, LAYERS = 64, 1024, 6, 3

Routes = list[list[int]]  # the tokens of each expert in each layer


class Mixture(nn.Module):
    """A layer that sends consecutive tokens to each expert. An expert without tokens does not run."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(EXPERTS)
        )

    def forward(self, x: torch.Tensor, counts: list[int]) -> torch.Tensor:
        parts = self.norm(x).split(counts)
        run = [expert(part) for expert, part, count in zip(self.experts, parts, counts, strict=True) if count]
        return x + torch.cat(run).tanh()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mixture() for _ in range(LAYERS))

    def forward(self, x: torch.Tensor, step: Routes) -> torch.Tensor:
        for layer, counts in zip(self.layers, step, strict=True):
            x = layer(x, counts)
        return x


def routes(seed: int) -> Routes:
    numbers = random.Random(seed)
    found = []
    for _ in range(LAYERS):
        weights = [0.0 if numbers.random() < 0.15 else numbers.uniform(0.6, 1.4) for _ in range(EXPERTS)]
        weights[numbers.randrange(EXPERTS)] += 0.5  # not all are 0
        counts = [int(TOKENS * weight / sum(weights)) for weight in weights]
        counts[counts.index(max(counts))] += TOKENS - sum(counts)
        found.append(counts)
    return found


@dataclass(frozen=True)
class Trained:
    times: list[int]
    peaks: list[int]
    parameters: list[torch.Tensor]
    session: Session | None


def trained(steps: list[Routes], budget: int | None = None, *, fake: bool = True) -> Trained:
    with VirtualMachine("rtx-4090", fake=fake) as machine:
        torch.manual_seed(0)
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        x = torch.randn(TOKENS, WIDTH)
        times, peaks = [], []
        session = None if budget is None else vdnn.offload(budget=budget, device=machine, min_bytes=4096)
        with session or contextlib.nullcontext():
            for step in steps:
                machine.reset_peak()
                begin_ns = machine.now_ns
                model(x, step).square().mean().backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
                times.append(machine.now_ns - begin_ns)
                peaks.append(machine.peak_bytes)
        return Trained(times, peaks, [one.detach().clone() for one in model.parameters()], session)


@pytest.mark.slow
def test_experts_of_changing_sizes_keep_within_the_budget_and_follow_their_plan() -> None:
    steps = [routes(seed) for seed in range(10)]
    kept = trained(steps)
    budget = int(0.75 * max(kept.peaks))
    under = trained(steps, budget)
    assert [peak for peak in under.peaks if peak > budget] == []
    assert sum(under.times[5:]) < 1.5 * sum(kept.times[5:])


@pytest.mark.drawn(of=2)
@pytest.mark.parametrize("share", [0.65, 0.8])
def test_the_result_is_that_of_plain_torch(share: float) -> None:
    steps = [routes(seed) for seed in range(8)]
    plain = trained(steps, fake=False)
    under = trained(steps, int(share * max(plain.peaks)), fake=False)
    assert under.session is not None
    assert under.session.counters.storages + under.session.counters.discarded > 0, "nothing left the device"
    assert all(map(torch.equal, plain.parameters, under.parameters))


def test_a_mask_that_is_large_at_one_size_only_skips_no_part_of_the_plan() -> None:
    """The mask is saved in the second micro-batch only, and then in the first one only."""

    def train(session_steps: list[list[int]]) -> int:
        with VirtualMachine("titan-x") as machine:
            layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(12))
            with vdnn.offload(budget="900KiB", device=machine, min_bytes=16 << 10) as session:
                for lengths in session_steps:
                    for length in lengths:
                        y = torch.zeros(length, 64)
                        mask = torch.ones(length, length, dtype=torch.bool).tril()
                        for index, layer in enumerate(layers):
                            y = layer(y).tanh()
                            if index == 1:
                                scores = (y @ y.t()).masked_fill(mask, 0.0)
                                y = y + scores @ y
                        y.square().sum().backward()
                    session.step()
            executors = [sized_plan.executor for sized_plan in session._engine.steps._plans.plans]
            return max(executor.differences for executor in executors)

    small, large = 96, 160  # masks of 9 and of 25 KiB
    assert train([[small, large], [small, large], [large, small]]) <= 2


def test_an_expert_that_the_other_step_had_not_gets_the_recomputes_of_its_neighbors() -> None:
    all_run = [[TOKENS // EXPERTS] * (EXPERTS - 1) + [TOKENS - TOKENS // EXPERTS * (EXPERTS - 1)]] * LAYERS
    one_idle = [[*counts[:-2], counts[-2] + counts[-1], 0] for counts in all_run]
    known, more = (trained([step] * 2, 1 << 30).session for step in (one_idle, all_run))
    assert known is not None
    assert known.recording is not None
    assert more is not None
    assert more.recording is not None
    recorded = more.recording
    bare = replace(recorded, lifetimes=tuple(replace(one, recompute=None) for one in recorded.lifetimes))
    found = with_recomputes_of(known.recording, bare)
    made = {one.operation: one.inputs for one in (each.recompute for each in found.lifetimes[18:21]) if one is not None}
    assert made == {"addmm": (18,), "gelu": (19,)}, "the saves of the last expert of the first layer"
    assert [one.recompute for one in recorded.lifetimes[18:20]] != [None, None]


def test_stored_bytes_are_those_of_the_lifetimes_less_what_is_away() -> None:
    session = trained([routes(0)] * 2, 1 << 30).session
    assert session is not None
    assert session.recording is not None
    recording = session.recording
    kept = tuple(PlannedLifetime(one.nbytes, Action.KEEP) for one in recording.lifetimes)
    everything = live_bytes(recording.lifetimes, len(recording.points))
    assert stored_bytes(recording, kept) == stored_bytes(recording, kept, {Action.KEEP}) == everything
    moved = offload_everything(recording)
    stored = stored_bytes(recording, moved)
    assert all(now <= before for now, before in zip(stored, everything, strict=True))
    assert max(stored) < max(everything)
    assert min(stored) >= 0
