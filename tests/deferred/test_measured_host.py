"""The host of a session is measured in settled steps, on a device that computes behind it, and plans are made for it.

The accelerator computes in virtual time, and so its host is slow beside it whatever the machine.
"""

from __future__ import annotations

import contextlib
import importlib
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import vdnn
from deferred import Mode
from deferred.deferred_accelerator import DeferredAccelerator
from tests.deferred.gauges import DeferredGauges
from vdnn.runtime.session.session import Session
from vdnn.runtime.steps.host_meter import HostMeter, HostOfPlan, HostTimes
from vdnn.runtime.steps.planner import PlanMaker
from vdnn.step.plan import Action, Plan

STEPS = 14
WIDTH = 64
LAYERS = 6


class Waiting(nn.Module):
    """Takes the host a millisecond and the device nothing."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        until = time.perf_counter() + 1e-3
        while time.perf_counter() < until:
            pass
        return x


def model_of(layer: Callable[[], nn.Module]) -> nn.Module:
    return nn.Sequential(
        *[
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), layer(), nn.LayerNorm(WIDTH), nn.Tanh())
            for _ in range(LAYERS)
        ]
    )


class Ran:
    """A training: losses and gradients, its plans in turn, and what was measured of the host under each."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self.plans: list[Plan] = []
        self.measured: list[tuple[HostTimes, Plan]] = []
        self.session: Session | None = None
        self.peak_bytes = 0
        self.report = ""


def train(
    mode: Mode,
    monkeypatch: pytest.MonkeyPatch,
    budget_bytes: int | None,
    layer: Callable[[], nn.Module] = nn.Identity,
    host: Callable[[HostTimes], HostTimes] = lambda times: times,
    waits: Callable[[Ran], None] | None = None,
) -> Ran:
    """`host` gives the figures that are planned with in place of those that were measured. `waits` is called in each
    step, behind the hooks; whole steps are compared only where it is given, since other load makes them longer too."""
    ran = Ran()
    issue = HostMeter._issue

    def noting(self: HostMeter, times: HostTimes) -> HostOfPlan:
        assert ran.session is not None
        assert ran.session.plan is not None
        ran.measured.append((times, ran.session.plan))
        return issue(self, host(times))

    with DeferredAccelerator(mode, seed=5, capacity="64MiB") as accelerator, monkeypatch.context() as patched:
        patched.setattr(HostMeter, "_issue", noting)
        if waits is None:
            patched.setattr(HostMeter, "_note_beginning", lambda meter, executor: None)
        opening = importlib.import_module("vdnn.runtime.session.offload")
        patched.setattr(opening, "_gauges", lambda _, one: DeferredGauges(one.torch_device, one.device, accelerator))
        torch.manual_seed(0)
        model = model_of(layer).to("deferred")
        session: Any = contextlib.nullcontext()
        if budget_bytes is not None:
            session = ran.session = vdnn.offload(device=accelerator, budget=budget_bytes, min_bytes=0)
        with session:
            for step in range(STEPS):
                x = torch.sin(torch.arange(128 * WIDTH, dtype=torch.float32) + step).reshape(128, WIDTH).to("deferred")
                loss = model(x).square().mean()
                loss.backward()
                ran.values.append(loss.item())
                ran.values += [one.grad.cpu() for one in model.parameters() if one.grad is not None]
                model.zero_grad()
                if waits is not None:
                    waits(ran)
                if ran.session is not None:
                    ran.session.step()
                    if ran.session.plan is not None and (not ran.plans or ran.plans[-1] is not ran.session.plan):
                        ran.plans.append(ran.session.plan)
        accelerator.synchronize()
        assert accelerator.violations == []
        ran.peak_bytes = accelerator.memory.peak_bytes
        if ran.session is not None:
            ran.report = ran.session.report()
            ran.session.close()
    return ran


def with_slow_recomputes(times: HostTimes) -> HostTimes:
    return times._replace(recomputing_ns=10_000_000 * times.recomputes)


def same(one: list[Any], other: list[Any]) -> bool:
    pairs = zip(one, other, strict=True)
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


def actions(plan: Plan) -> int:
    """How much the plan gives the host to do: each copy, of which a move has two, and each recompute."""
    return sum({Action.KEEP: 0, Action.OFFLOAD: 2}.get(one.action, 1) for one in plan.lifetimes)


def test_the_time_of_the_program_and_that_of_hooks_are_told_apart(mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = train(mode, monkeypatch, None)
    ran = train(mode, monkeypatch, int(0.7 * plain.peak_bytes), Waiting)
    assert same(ran.values, plain.values)
    assert ran.measured
    for times, plan in ran.measured:
        assert times.outside_ns > LAYERS * 1e6, "the program waits a millisecond in each layer"
        assert 0 < times.kept_ns < times.outside_ns
        recomputed = sum(one.is_recomputed for one in plan.lifetimes)
        assert times.recomputes == recomputed
        assert bool(times.recomputing_ns) is bool(recomputed)
        assert bool(times.moving_ns) is bool(times.moves)
        assert times.moves <= actions(plan) - recomputed


def test_a_plan_whose_recomputes_the_host_cannot_issue_in_time_is_made_again(
    mode: Mode, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain = train(mode, monkeypatch, None)
    with caplog.at_level("INFO", logger="vdnn"):
        ran = train(mode, monkeypatch, int(0.6 * plain.peak_bytes), host=with_slow_recomputes)
    assert same(ran.values, plain.values)
    assert "It is planned again" in caplog.text
    recomputed = [sum(one.is_recomputed for one in plan.lifetimes) for plan in ran.plans]
    assert recomputed[-1] < recomputed[0]
    assert "bound by the host: it needs" in ran.report


def test_a_plan_for_the_host_that_makes_steps_slower_goes(
    mode: Mode, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As where a program waits for its device inside of a step, which seems to be a slow host."""
    # These gauges see no peak between two hooks, so a plan may take more than it says and be made again for less.
    monkeypatch.setattr(PlanMaker, "tighten", lambda maker, sized_plan, peak_bytes, resident_bytes: None)
    plain = train(mode, monkeypatch, None)

    def waits(ran: Ran) -> None:
        plan = None if ran.session is None else ran.session.plan
        if plan is not None and not any(one.is_recomputed for one in plan.lifetimes):
            time.sleep(0.4)

    with caplog.at_level("INFO", logger="vdnn"):
        ran = train(mode, monkeypatch, int(0.6 * plain.peak_bytes), host=with_slow_recomputes, waits=waits)
    assert same(ran.values, plain.values)
    assert "made steps slower" in caplog.text
    last, for_host, before = ran.plans[-1], ran.plans[-2], ran.plans[-3]
    assert last is before
    assert any(one.is_recomputed for one in last.lifetimes)
    assert not any(one.is_recomputed for one in for_host.lifetimes)
    assert "but a plan for that made steps slower" in ran.report
    assert "bound by the host" not in ran.report


def test_a_host_that_is_fast_enough_changes_no_plan(mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = train(mode, monkeypatch, None)
    budget_bytes = int(0.6 * plain.peak_bytes)

    def fast(times: HostTimes) -> HostTimes:
        return HostTimes(0, 0, 0, times.moves, 0, times.recomputes)

    ran = train(mode, monkeypatch, budget_bytes, host=fast)
    assert same(ran.values, plain.values)
    assert len(ran.measured) == 1, "of the plan that all later steps follow"
    assert "host: needs 0.00 ms to issue the step" in ran.report
    assert "bound by the host" not in ran.report


@pytest.mark.parametrize("is_behind_host", [True, False])
def test_only_a_device_behind_its_host_is_measured(
    mode: Mode, monkeypatch: pytest.MonkeyPatch, is_behind_host: bool
) -> None:
    monkeypatch.setattr(DeferredGauges, "is_behind_host", is_behind_host)
    plain = train(mode, monkeypatch, None)
    ran = train(mode, monkeypatch, int(0.7 * plain.peak_bytes))
    assert bool(ran.measured) is is_behind_host
    assert ("the step" in ran.report and "to issue" in ran.report) is is_behind_host
