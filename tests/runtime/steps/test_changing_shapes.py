"""Steps whose shapes change: a plan serves smaller steps, and a step without a plan keeps within the budget."""

from __future__ import annotations

import contextlib
import itertools
import random
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import vdnn
from tests.drawn import quick_and_full
from vdnn.planning.costs import profile_costs
from vdnn.planning.simulate import simulate
from vdnn.runtime.machine.virtual_machine import VirtualMachine
from vdnn.runtime.session.session import Session
from vdnn.runtime.steps import planner
from vdnn.runtime.steps.guard import TRANSIENTS
from vdnn.runtime.steps.plan_table import StepTally
from vdnn.runtime.steps.planner import PlanMaker

WIDTH = 128


class Block(nn.Module):
    """Attention and a perceptron, written out, so that the maps grow with the square of the length."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, 3 * WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.project(x).chunk(3, -1)
        x = x + (query @ key.transpose(1, 2)).softmax(-1) @ value
        return x + self.down(nn.functional.gelu(self.up(x)))  # type: ignore[no-any-return]


def language_model() -> nn.Module:
    return nn.Sequential(nn.Embedding(500, WIDTH), *(Block() for _ in range(3)), nn.Linear(WIDTH, 500))


@dataclass(frozen=True)
class Trained:
    times: list[int]
    peaks: list[int]
    parameters: list[torch.Tensor]
    session: Session | None


def trained(
    lengths: list[int], budget: int | str | None = None, *, fake: bool = True, batch: int = 8, micro_batches: int = 1
) -> Trained:
    with VirtualMachine("rtx-4090", fake=fake) as machine:
        torch.manual_seed(0)
        model = language_model()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        times, peaks = [], []

        def step(row: list[int]) -> None:
            machine.reset_peak()
            begin_ns = machine.now_ns
            for length in row:
                model(torch.arange(batch * length).view(batch, length) % 500).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            times.append(machine.now_ns - begin_ns)
            peaks.append(machine.peak_bytes)

        session = None if budget is None else vdnn.offload(budget=budget, device=machine, min_bytes=0)
        for begin in range(0, len(lengths), micro_batches):
            with contextlib.nullcontext() if session is None else session:
                step(lengths[begin : begin + micro_batches])
        return Trained(times, peaks, [one.detach() for one in model.parameters()], session)


def random_lengths(steps: int, seed: int = 0) -> list[int]:
    numbers = random.Random(seed)
    return [numbers.randrange(64, 513, 8) for _ in range(steps)]


def budget_of(lengths: list[int], share: float) -> int:
    return int(share * max(trained([max(lengths)] * 2).peaks))


@pytest.mark.slow
@quick_and_full("steps", 12, 20)
def test_steps_of_any_length_keep_within_the_budget_and_cost_little(steps: int) -> None:
    lengths = random_lengths(steps)
    budget_bytes = budget_of(lengths, 0.6)
    plain, ours = trained(lengths), trained(lengths, budget_bytes)
    assert [peak for peak in ours.peaks if peak > budget_bytes] == []
    assert sum(ours.times[5:]) <= 1.1 * sum(plain.times[5:])


def test_a_step_that_fits_moves_nothing_though_it_has_no_plan() -> None:
    lengths = [64, 128]
    ours = trained(lengths, 4 * budget_of(lengths, 1))
    assert ours.session is not None
    assert ours.session.counters.storages == 0
    assert ours.times == trained(lengths).times


def test_the_first_step_moves_what_is_over_the_budget_and_a_window() -> None:
    save_bytes = 4 << 20

    def first_step(budget: int | None) -> tuple[int, int]:
        """The peak, and the bytes that were offloaded."""
        with VirtualMachine("rtx-4090") as machine:
            model = nn.Sequential(*(nn.Tanh() for _ in range(64)))
            x = torch.empty(1024, 1024, requires_grad=True)
            session = None if budget is None else vdnn.offload(budget=budget, device=machine)
            machine.reset_peak()
            with session or contextlib.nullcontext():
                model(x).sum().backward()
            return machine.peak_bytes, 0 if session is None else session.counters.storage_bytes

    kept_peak, _ = first_step(None)
    budget_bytes = int(0.6 * kept_peak)
    peak, offloaded_bytes = first_step(budget_bytes)
    assert peak <= budget_bytes
    assert offloaded_bytes <= kept_peak - budget_bytes + budget_bytes // 8 + (TRANSIENTS + 1) * save_bytes


def test_one_plan_serves_all_smaller_steps() -> None:
    lengths = [512, 512, 512, 384, 500, 256, 128]
    ours = trained(lengths, budget_of(lengths, 0.8))
    assert ours.session is not None
    steps = ours.session._engine.steps
    assert steps.first_difference is None
    assert steps.plan_use is not None
    assert sum(one.steps for one in steps.plan_use.counts if one.followed.is_planned) >= 5


@pytest.mark.parametrize("share", [0.5, 0.8])
def test_gradients_are_the_same_bits_at_every_length(share: float) -> None:
    lengths = [length // 8 for length in random_lengths(12, seed=1)]
    with torch.random.fork_rng():
        budget_bytes = budget_of(lengths, share)
        plain = trained(lengths, fake=False, batch=2)
        ours = trained(lengths, budget_bytes, fake=False, batch=2)
    assert all(map(torch.equal, plain.parameters, ours.parameters))


@pytest.mark.slow
@quick_and_full("steps", 4, 7)
def test_micro_batches_of_any_length_keep_within_the_budget(steps: int) -> None:
    """Each step is largest in another of its micro-batches. Each micro-batch follows a plan of its own."""
    lengths = random_lengths(4 * steps)
    budget_bytes = budget_of(lengths, 0.6)
    ours = trained(lengths, budget_bytes, micro_batches=4)
    assert [peak for peak in ours.peaks if peak > budget_bytes] == []
    assert ours.session is not None
    tables = ours.session._engine.steps._plans._tables  # type: ignore[union-attr]
    assert sum(sized_plan.steps for table in tables.values() for sized_plan in table.plans) > 0


def slowdowns(ours: Trained, lengths: list[int]) -> list[float]:
    return [mine / plain for mine, plain in zip(ours.times, trained(lengths).times, strict=True)]


def test_a_step_between_two_recorded_ones_moves_nothing_if_it_fits() -> None:
    lengths = [64, 512, 256, 384, 384, 64, 200, 200]
    ours = trained(lengths, budget_of(lengths, 0.8))
    assert slowdowns(ours, lengths)[4:] == pytest.approx([1] * 4)


@pytest.mark.slow
@quick_and_full("last", 448, 640)
def test_sizes_that_grow_slowly_are_planned_ahead(last: int) -> None:
    lengths = list(range(256, last, 24))
    budget_bytes = budget_of(lengths, 0.7)
    ours = trained(lengths, budget_bytes)
    assert max(ours.peaks) <= budget_bytes
    assert max(slowdowns(ours, lengths)[4:]) <= 1.2


@pytest.mark.slow
def test_models_in_turn_have_plan_tables_of_their_own_and_room_for_the_state_of_later_optimizers() -> None:
    """The state of an optimizer comes with its first step, which is the one that is recorded for the second model."""
    with VirtualMachine("rtx-4090") as machine:
        models = [
            nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(12)))
            for width in (256, 512)
        ]
        optimizers = [torch.optim.AdamW(model.parameters(), fused=True) for model in models]
        inputs = [torch.ones(4096, width) for width in (256, 512)]

        def peaks(session: Session | None) -> list[int]:
            found = []
            for step in range(10):
                machine.reset_peak()
                with contextlib.nullcontext() if session is None else session:
                    models[step % 2](inputs[step % 2]).square().mean().backward()
                    optimizers[step % 2].step()
                    optimizers[step % 2].zero_grad()
                found.append(machine.peak_bytes)
            return found

        budget_bytes = int(0.9 * max(peaks(None)))
        for optimizer in optimizers:
            optimizer.state.clear()
        session = vdnn.offload(budget=budget_bytes, device=machine, min_bytes=0)
        assert max(peaks(session)) <= budget_bytes
        assert len(session._engine.steps._plans._tables) == 2  # type: ignore[union-attr]


@pytest.mark.slow
@quick_and_full("steps, share", (16, 0.75), (40, 0.5))
def test_without_time_for_more_plans_smaller_steps_follow_those_of_larger_ones(
    monkeypatch: pytest.MonkeyPatch, steps: int, share: float
) -> None:
    """On a GPU the training waits for its plans. A plan for each of many lengths would take longer than the steps."""
    lengths = random_lengths(steps)
    budget = budget_of(lengths, 0.6)
    made = []
    for may_improve in (True, False):
        monkeypatch.setattr(PlanMaker, "may_improve", may_improve)
        found = trained(lengths, budget)
        assert max(found.peaks) <= budget
        assert found.session is not None
        use = found.session._engine.steps.plan_use
        assert use is not None
        made.append(use.made)
    assert made[1] < made[0] * share, made


def test_plans_that_are_not_needed_take_a_tenth_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(planner, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def maker(profile: object) -> PlanMaker:
        return PlanMaker(SimpleNamespace(profile=profile, policy=None, costs=None), StepTally())  # type: ignore[arg-type]

    real, virtual = maker(None), maker(object())
    assert real.may_improve
    for one in (real, virtual):
        with one._planning():
            now[0] += 1.0
    assert (real.may_improve, virtual.may_improve) == (False, True)
    now[0] = 9.9
    assert not real.may_improve
    now[0] = 10.1
    assert real.may_improve


@pytest.mark.slow
def test_the_recording_of_a_session_is_that_of_its_plan() -> None:
    """Later steps are recorded too, and the plan does not belong to them. On a GPU a prediction failed by that."""
    lengths = random_lengths(8)
    budget = budget_of(lengths, 0.5)
    with VirtualMachine("rtx-4090") as machine:
        model, predicted = language_model(), 0
        with vdnn.offload(budget=budget, device=machine, min_bytes=0) as session:
            for length in lengths:
                model(torch.arange(8 * length).view(8, length) % 500).square().mean().backward()
                session.step()
                if session.plan is not None:
                    assert session.recording is not None
                    timeline = simulate(session.recording, session.plan, profile_costs(machine.profile))
                    predicted += timeline.peak_bytes <= budget
    assert predicted >= 6


class Joined(nn.Module):
    """Maps of three sides, joined again: their operations take much beside what they save."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (3, 32, 64, 128)
        self.down = nn.ModuleList(
            nn.Sequential(nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(8, after), nn.SiLU())
            for before, after in itertools.pairwise(sizes)
        )
        self.up = nn.ModuleList(
            nn.Sequential(nn.Conv2d(before, after, 3, padding=1), nn.ReLU())
            for before, after in ((128, 64), (128, 32), (64, 32))
        )
        self.out = nn.Conv2d(32, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for index, block in enumerate(self.down):
            x = block(nn.functional.max_pool2d(x, 2) if index else x)
            kept.append(x)
        x = self.up[0](kept.pop())
        for block in self.up[1:]:
            x = block(torch.cat([nn.functional.interpolate(x, scale_factor=2.0), kept.pop()], 1))
        return self.out(x)  # type: ignore[no-any-return]


def test_a_second_step_that_is_larger_than_the_first_has_a_plan_by_a_guess() -> None:
    """The guard alone does not know what operations take that it has not seen."""

    def train(budget: int | None, sides: tuple[int, ...]) -> list[int]:
        peaks = []
        with VirtualMachine("rtx-4090") as machine:
            model = Joined()
            around = contextlib.nullcontext() if budget is None else vdnn.offload(budget=budget, device=machine)
            with around:
                for side in sides:
                    machine.reset_peak()
                    model(torch.randn(8, 3, side, side)).square().mean().backward()
                    peaks.append(machine.peak_bytes)
                    model.zero_grad()
        return peaks

    budget = int(0.55 * max(train(None, (256, 256))))
    assert max(train(budget, (120, 256, 120, 256))) <= budget
