"""A host that was measured in steps that follow a plan. The plan is made again if the host needs longer than the
device, and the new one is never slower on that host."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from vdnn.hardware import HostFigures, load_profile
from vdnn.planning.budget import Budget
from vdnn.planning.catalogue import make_quick_planner
from vdnn.planning.simulate import simulate
from vdnn.runtime.rehearsal.rehearsal import rehearse, subject_of
from vdnn.runtime.steps.host_meter import HostOfPlan
from vdnn.runtime.steps.plan_table import PlanOrigin, SizedPlan, StepTally
from vdnn.runtime.steps.planner import BudgetPlanner, PlanMaker
from vdnn.step.plan import Plan
from vdnn.step.recording import Recording

SHARE = 0.7


def encoder(batch: int) -> tuple[nn.Module, torch.Tensor]:
    layers = [nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True) for _ in range(4)]
    return nn.Sequential(*layers), torch.randn(batch, 128, 256)


@functools.cache
def recorded() -> Recording:
    recording = rehearse(subject_of(encoder, 32, None), "h100").recording
    return recording.without_host()


def made(policy: str = "auto", share: float = SHARE) -> tuple[PlanMaker, SizedPlan]:
    """A plan that was made without knowing the host."""
    budget = Budget(int(share * recorded().peak_bytes), None)
    planner = BudgetPlanner(make_quick_planner(policy), budget, None, load_profile("h100"))
    maker, found = PlanMaker(planner, StepTally()), list[SizedPlan]()
    maker.make_from(recorded(), None, None, PlanOrigin.RECORDED, found.append, lambda error: False)
    return maker, found[0]


def host(issue_ns: int, copy_ns: int, recompute_ns: int, step_ns: int | None = None) -> HostOfPlan:
    return HostOfPlan(issue_ns, HostFigures(0, 0, 0, copy_ns, recompute_ns), step_ns)


def step_ns(maker: PlanMaker, plan: Plan, measured: HostOfPlan) -> int:
    recording, costs = maker.planner.on_host(recorded(), None, measured)
    return simulate(recording, plan, costs).step_ns


@pytest.mark.parametrize("share", [0.0, 0.5, 0.99, 1.5])
@pytest.mark.parametrize("copy_us", [5, 100])
@pytest.mark.parametrize("recompute_us", [20, 1000])
def test_a_plan_for_the_host_is_never_slower_on_it(share: float, copy_us: int, recompute_us: int) -> None:
    maker, sized_plan = made()
    measured = host(int(share * recorded().compute_ns), copy_us * 1000, recompute_us * 1000)
    before = sized_plan.executor.plan
    before_ns = step_ns(maker, before, measured)
    maker.plan_for_host(sized_plan, measured)
    after_ns = step_ns(maker, sized_plan.executor.plan, measured)
    assert after_ns <= before_ns
    assert sized_plan.peak_bytes <= SHARE * recorded().peak_bytes
    if sized_plan.executor.plan is not before:
        assert sized_plan.is_bound_by_host
        assert maker.latest is sized_plan.executor
        assert after_ns < 0.98 * before_ns


def test_recomputes_that_the_host_cannot_issue_in_time_are_given_up() -> None:
    maker, sized_plan = made()
    assert any(one.is_recomputed for one in sized_plan.executor.plan.lifetimes)
    measured = host(recorded().compute_ns // 2, 1000, recorded().compute_ns // 4)
    maker.plan_for_host(sized_plan, measured)
    before = sum(one.is_recomputed for one in made()[1].executor.plan.lifetimes)
    assert sum(one.is_recomputed for one in sized_plan.executor.plan.lifetimes) < before


def test_later_plans_of_that_size_are_made_for_the_host_too() -> None:
    maker, sized_plan = made()
    measured = host(recorded().compute_ns // 2, 1000, recorded().compute_ns // 4)
    maker.plan_for_host(sized_plan, measured)
    recomputed = sum(one.is_recomputed for one in sized_plan.executor.plan.lifetimes)
    maker.leave_room(sized_plan)
    assert sum(one.is_recomputed for one in sized_plan.executor.plan.lifetimes) <= recomputed + 1
    assert sized_plan.host is measured


def test_a_plan_is_made_again_for_the_host_a_few_times_only() -> None:
    maker, sized_plan = made()
    expensive = [host(recorded().compute_ns, *costs) for costs in ((1000, 10**8), (10**8, 1000))]
    executors = set()
    for number in range(20):
        maker.plan_for_host(sized_plan, expensive[number % 2])
        executors.add(sized_plan.executor)
    assert 1 < len(executors) <= 4


def slow_host(step_ns: int | None) -> HostOfPlan:
    return host(recorded().compute_ns // 2, 1000, recorded().compute_ns // 4, step_ns)


@pytest.mark.parametrize(
    ("before_ns", "after_ns", "goes_back"),
    [(1000, 1030, True), (1000, 1010, False), (1000, 900, False), (None, 1030, False), (1000, None, False)],
)
def test_a_plan_for_the_host_that_makes_steps_slower_goes(
    before_ns: int | None, after_ns: int | None, goes_back: bool
) -> None:
    maker, sized_plan = made()
    before = sized_plan.executor.plan
    maker.plan_for_host(sized_plan, slow_host(before_ns))
    for_host = sized_plan.executor.plan
    assert for_host is not before
    maker.plan_for_host(sized_plan, slow_host(after_ns))
    assert sized_plan.executor.plan is (before if goes_back else for_host)
    assert maker.latest is sized_plan.executor
    assert (sized_plan.host_to_plan_for is None) is goes_back
    for _ in range(3):
        maker.plan_for_host(sized_plan, slow_host(500))
    assert (sized_plan.executor.plan is before) is goes_back, "what is measured later changes no decision"
    maker.leave_room(sized_plan)
    recomputed = sum(one.is_recomputed for one in before.lifetimes)
    assert (sum(one.is_recomputed for one in sized_plan.executor.plan.lifetimes) >= recomputed) is goes_back


def test_no_plan_from_before_comes_back_once_there_is_another_one() -> None:
    maker, sized_plan = made()
    maker.plan_for_host(sized_plan, slow_host(1000))
    maker.leave_room(sized_plan)
    after = sized_plan.executor
    maker.plan_for_host(sized_plan, slow_host(2000))
    assert sized_plan.executor is after


def test_other_policies_keep_their_plans() -> None:
    maker, sized_plan = made("vdnn-all", 0.9)
    before = sized_plan.executor
    maker.plan_for_host(sized_plan, host(recorded().compute_ns * 2, 10**7, 10**7))
    assert sized_plan.executor is before
    assert sized_plan.is_bound_by_host
