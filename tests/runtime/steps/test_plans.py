"""A plan is followed to the byte, on its own machine and on others. Differences are reported, and do no harm."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import vdnn
from tests.runtime.conftest import OpenSession
from tests.runtime.rigs.side_by_side import assert_nothing_alive, assert_same_as_plain
from tests.runtime.rigs.virtual_training import MODELS, loss_of, train, trained_virtually
from vdnn.errors import BudgetError, VdnnError
from vdnn.hardware import load_profile
from vdnn.planning.catalogue import planner_names
from vdnn.planning.costs import profile_costs
from vdnn.planning.footprint import interval_bytes, offload_everything
from vdnn.planning.least_memory import least_bytes
from vdnn.planning.planned_step import PlannedStep, plan_step
from vdnn.planning.search.prefix_cut import prefix_cut
from vdnn.runtime.machine.virtual_machine import VirtualMachine
from vdnn.runtime.steps.planner import SLACK, BudgetPlanner
from vdnn.step.plan import Absence, Action, Plan, PlannedLifetime, make_plan
from vdnn.step.recording import Recording
from vdnn.step.timeline import Timeline, Track
from vdnn.user_warnings import VdnnWarning


def recording_of(name: str) -> Recording:
    recording = trained_virtually(name).recording
    assert recording is not None
    return recording


def recording_with_data(name: str) -> Recording:
    """oneDNN's recurrent kernel saves a workspace, which the fake kernel does not."""
    with VirtualMachine("titan-x", fake=False) as machine:
        session, _ = train(machine, name)
        session.close()
    assert session.recording is not None
    return session.recording


@pytest.mark.drawn(of=2)
@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 1.0])
@pytest.mark.parametrize("name", MODELS)
def test_the_planned_peak_is_the_executed_peak(name: str, share: float) -> None:
    recording = recording_of(name)
    least = least_bytes(recording)
    plan = prefix_cut(recording, least + round(share * (recording.peak_bytes - least)))
    session = trained_virtually(name, plan)
    assert session.timeline is not None
    assert session.timeline.peak_bytes == max(interval_bytes(recording, plan.lifetimes))
    assert session.plan == plan


@pytest.mark.parametrize("name", MODELS)
def test_what_the_plan_moves_is_moved_and_nothing_else(name: str) -> None:
    recording = recording_of(name)
    plan = prefix_cut(recording, (least_bytes(recording) + recording.peak_bytes) // 2)
    timeline = trained_virtually(name, plan).timeline
    assert timeline is not None
    assert timeline.copied_bytes(Track.TO_HOST) == plan.offloaded_bytes


@pytest.mark.parametrize("name", MODELS)
def test_gradients_under_a_plan_are_those_of_plain_torch(name: str, schedule: Any) -> None:
    """Runs at the least memory, with real numbers, copies that may run at any time, and hashes of all copies."""
    recording = recording_of(name)
    plan = make_plan(recording, "everything", offload_everything(recording))
    with VirtualMachine("titan-x", fake=False, schedule=schedule, seed=5) as machine:
        session, gradients = train(machine, name, plan, integrity=True)
        assert_nothing_alive(session)
    with VirtualMachine("titan-x", fake=False) as machine:
        _, plain = train(machine, name, "keep", measure=False)
    assert session.counters.storages
    assert "0 differ" in session.report()
    assert all(
        torch.equal(one, other) for one, other in zip(gradients, plain, strict=True) if one is not None is not other
    )
    session.close()


@pytest.mark.parametrize("name", MODELS)
def test_every_copy_under_a_plan_is_ordered(open_session: OpenSession, name: str) -> None:
    """Runs plans that offload everything as often as possible and reload as early as allowed, under the checker."""
    recording = recording_with_data(name)
    everything = make_plan(recording, "everything", offload_everything(recording))
    early = prefix_cut(recording, (least_bytes(recording) + recording.peak_bytes) // 2)
    for plan in (everything, early):
        session = open_session(plan)
        model, inputs = MODELS[name]()
        assert_same_as_plain(session, lambda: _loss(model, inputs), model)  # noqa: B023 (called at once)
        assert session._engine.steps is not None
        assert session._engine.steps.first_difference is None


def _loss(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    loss = loss_of(model(*inputs))
    loss.backward()
    return loss.detach()


def test_with_a_budget_it_records_plans_and_stays_under_it() -> None:
    recording = recording_of("resnet")
    budget = (least_bytes(recording) + recording.peak_bytes) // 2
    session = trained_virtually("resnet", budget=budget, steps=4)
    assert session.plan is not None
    assert session.plan.budget_bytes == int(budget * (1 - SLACK))
    assert session.timeline is not None
    assert session.timeline.peak_bytes <= budget
    assert 0 < session.plan.offloaded_bytes < recording.managed_bytes


def test_a_budget_that_the_model_fits_moves_nothing(recwarn: pytest.WarningsRecorder) -> None:
    session = trained_virtually("perceptron", budget="1GiB", steps=4)
    assert session.timeline is not None
    assert not session.timeline.copies
    assert session.timeline.stall_ns == 0
    assert not recwarn.list


def test_a_budget_that_cannot_be_met_is_an_error_with_the_smallest_that_can() -> None:
    with pytest.raises(BudgetError, match="cannot be met") as refused:
        trained_virtually("resnet", budget="1KiB")
    least = refused.value.least_bytes
    session = trained_virtually("resnet", budget=least, steps=4)
    assert session.timeline is not None
    moved = trained_virtually("resnet", budget=least, steps=4, recompute=False)
    assert moved.timeline is not None
    assert moved.timeline.peak_bytes == least
    # The peak is lower if another holder frees a discarded storage within an interval.
    assert 0.9 * least < session.timeline.peak_bytes <= least
    with pytest.raises(BudgetError):
        trained_virtually("resnet", budget=least - 1)


def test_a_plan_runs_on_another_machine(tmp_path: Path) -> None:
    plan = prefix_cut(recording_of("chain"), recording_of("chain").peak_bytes - 1000)
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    with VirtualMachine("h100") as machine:
        session, _ = train(machine, "chain", loaded)
    assert session._engine.steps is not None
    assert session._engine.steps.first_difference is None
    assert session.timeline is not None
    assert session.timeline.copied_bytes(Track.TO_HOST) == plan.offloaded_bytes


def test_a_plan_for_another_model_says_where_it_differs() -> None:
    plan = prefix_cut(recording_of("chain"), recording_of("chain").peak_bytes)
    with pytest.warns(VdnnWarning) as warned:
        session = trained_virtually("perceptron", plan)
    (warning,) = (str(one.message) for one in warned)
    assert "the step differs from the plan (made by 'prefix-cut' for cpu on titan-x): at save 0 it expects" in warning
    assert "float32 [128, 64]" in warning
    assert session.counters.storages, "what the plan does not know is left to the online policy"


class Sometimes(nn.Module):
    """A model that runs one more layer when asked."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.extra = nn.Linear(16, 16)
        self.asked = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x).tanh()
            if index == 1 and self.asked:
                x = self.extra(x).sigmoid()
        return x


def test_one_save_more_does_not_shift_those_behind_it(schedule: Any) -> None:
    torch.manual_seed(0)
    with VirtualMachine("titan-x", fake=False, schedule=schedule) as machine:
        model, x = Sometimes(), torch.randn(64, 16)
        with vdnn.offload("vdnn-all", device=machine, min_bytes=0, measure=True, warmup_steps=0) as session:
            model(x).sum().backward()
        assert session.recording is not None
        plan = make_plan(session.recording, "everything", offload_everything(session.recording))
        model.asked = True
        model.zero_grad()
        model(x).sum().backward()
        plain = [one.grad for one in model.parameters()]
        for one in model.parameters():
            one.grad = None
        with vdnn.offload(plan=plan, device=machine, min_bytes=0) as session:
            model(x).sum().backward()
        assert session._engine.steps is not None
        assert session._engine.steps.first_difference is not None
        assert "a save that is not in the plan: TanhBackward0 in extra" in session._engine.steps.first_difference
        assert all(torch.equal(one.grad, other) for one, other in zip(model.parameters(), plain, strict=True))
        executor = session._engine.steps._step.executor
        assert executor is None or executor.differences <= 2
        session.close()


def test_a_branch_that_never_runs_holds_nothing_up() -> None:
    """Skipped points count as reached: their releases and reloads are issued all the same."""
    with VirtualMachine("titan-x") as machine:
        model, x = Sometimes(), torch.randn(64, 16)
        model.asked = True
        with vdnn.offload("vdnn-all", device=machine, min_bytes=0, measure=True, warmup_steps=0) as session:
            model(x).sum().backward()
        assert session.recording is not None
        plan = make_plan(session.recording, "everything", offload_everything(session.recording))
        model.asked = False
        with vdnn.offload(plan=plan, device=machine, min_bytes=0, measure=True, warmup_steps=0) as session:
            for _ in range(3):
                model(x).sum().backward()
                session.step()
        assert session.counters.storages == 3 * 3  # in each step all results but the last, which is used at once
        assert_nothing_alive(session)


def test_two_models_in_turn_get_a_plan_each() -> None:
    """A generator and a discriminator: every optimizer's step ends a step, and the two begin differently."""
    with VirtualMachine("titan-x") as machine:
        models = [
            nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()),
            nn.Sequential(nn.Tanh(), nn.Linear(16, 64), nn.Tanh()),
        ]
        optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in models]
        inputs = [torch.randn(256, 8), torch.randn(256, 16)]
        with vdnn.offload(device=machine, min_bytes=0, budget="1GiB") as session:
            for _ in range(4):
                for model, optimizer, x in zip(models, optimizers, inputs, strict=True):
                    model(x).square().sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
    assert session._engine.steps is not None
    assert len(session._engine.steps._plans._tables) == 2
    assert session._engine.steps.first_difference is None


def test_a_plan_that_contradicts_itself_is_refused() -> None:
    plan = prefix_cut(recording_of("chain"), recording_of("chain").peak_bytes)
    backwards = PlannedLifetime(10, Action.OFFLOAD, (Absence(5, 3),))
    with pytest.raises(vdnn.VdnnError, match="got lifetime 0, which is released at point 5 and reloaded at 3"):
        dataclasses.replace(plan, lifetimes=(backwards, *plan.lifetimes[1:]))
    at_once = PlannedLifetime(10, Action.OFFLOAD, (Absence(5, 5),))
    with pytest.raises(vdnn.VdnnError, match="got lifetime 0, which is released at point 5 and reloaded at 5"):
        dataclasses.replace(plan, lifetimes=(at_once, *plan.lifetimes[1:]))
    with pytest.raises(vdnn.VdnnError, match="got lifetime 0 to offload with absences"):
        dataclasses.replace(plan, lifetimes=(PlannedLifetime(10, Action.OFFLOAD), *plan.lifetimes[1:]))


def test_a_step_over_its_budget_leads_to_a_tighter_plan(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The planner is wrong by 20 kB. The second plan makes up for it, and the log reports it."""
    right = BudgetPlanner.planned

    def too_much(
        self: BudgetPlanner, recording: Recording, timeline: Timeline | None, tightened: int = 0, **where: Any
    ) -> PlannedStep:
        return right(self, recording, timeline, tightened - 20_000, **where)

    recording = recording_of("resnet")
    budget = (least_bytes(recording) + recording.peak_bytes) // 2
    monkeypatch.setattr(BudgetPlanner, "planned", too_much)
    with caplog.at_level(logging.WARNING, logger="vdnn"):
        session = trained_virtually("resnet", budget=budget, steps=7)
    assert session.timeline is not None
    assert session.timeline.peak_bytes <= budget
    said = [record.message for record in caplog.records if "more than its budget" in record.message]
    assert 1 <= len(said) <= 3


def test_what_the_host_cannot_hold_is_refused_with_both_numbers() -> None:
    recording = recording_of("resnet")
    budget = (least_bytes(recording) + recording.peak_bytes) // 2
    with pytest.raises(VdnnError, match=r"host_budget 4.00 KiB is too small: to stay under .* have to be offloaded"):
        trained_virtually("resnet", budget=budget, host_budget="4KiB", steps=4)


def test_a_policy_without_a_plan_that_fits_says_what_it_needs() -> None:
    recording = recording_of("resnet")
    with pytest.raises(VdnnError, match=r"policy 'keep' has no plan under .*'auto' finds one from"):
        trained_virtually("resnet", "keep", budget=least_bytes(recording), steps=4)


@pytest.mark.parametrize("policy", planner_names())
def test_every_policy_is_run_as_it_predicts(policy: str) -> None:
    """The prediction holds to the nanosecond and the byte, copy by copy. If another holder frees a discarded storage
    within an interval, the peak of that interval is lower than predicted."""
    recording = recording_of("join")
    costs = profile_costs(load_profile("titan-x"))
    budget = (least_bytes(recording) + recording.peak_bytes) // 2
    planned = plan_step(recording, costs, budget, policy)
    timeline = trained_virtually("join", planned.plan).timeline
    assert timeline is not None
    executed = dataclasses.replace(timeline, source="predicted")
    if any(one.is_recomputed for one in planned.plan.lifetimes):
        pairs = list(zip(executed.marks, planned.timeline.marks, strict=True))
        assert all(mark.peak_bytes <= predicted.peak_bytes for mark, predicted in pairs)
        marks = tuple(dataclasses.replace(mark, peak_bytes=predicted.peak_bytes) for mark, predicted in pairs)
        executed = dataclasses.replace(executed, marks=marks)
    assert executed == planned.timeline


@pytest.mark.slow
def test_shares_and_the_least_are_budgets() -> None:
    recording = recording_of("resnet")
    least = trained_virtually("resnet", budget="min", steps=4)
    assert least.plan is not None
    assert least.plan.budget_bytes == least_bytes(recording)
    share = trained_virtually("resnet", budget="50%", steps=4)
    assert share.plan is not None
    assert share.plan.budget_bytes == load_profile("titan-x").memory_bytes // 2, "it fits, so nothing is left free"
    everything = trained_virtually("resnet", "auto", steps=4)
    assert everything.plan is not None
    assert everything.plan.budget_bytes == int(0.9 * load_profile("titan-x").memory_bytes)
