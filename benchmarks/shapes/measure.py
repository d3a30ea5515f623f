"""Runs a case in virtual time: with everything kept, under a budget, and each of its sizes alone under that budget.

The budget is 60 % of the peak of the largest step with everything kept. A size alone, trained until a step follows its
own plan, gives the time that the training under the budget is compared with. What fits needs no plan.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from unittest import mock

import vdnn
from benchmarks.shapes.cases import Case, Size, Subject
from benchmarks.shapes.figures import CaseFigures, Executed, StepFigures
from vdnn.planning.planned_step import plan_step
from vdnn.runtime.steps.planner import PlanMaker

HARDWARE = "rtx-4090"
BUDGET_SHARE = 0.6
# A size alone is trained for at most this many steps: one that is recorded, and a few whose plans are made anew.
_MOST_STEPS_ALONE = 5


@dataclass(frozen=True, slots=True)
class Training:
    """All steps of a case under the budget. `pinned_bytes`: the most that was pinned at one time, and what is pinned at
    the end. `planned_bytes`: the most that a plan of the session offloads. `planning_s`: processor time of planning."""

    steps: list[Executed]
    wall_s: float
    planning_s: float
    pinned_bytes: int
    pinned_at_end_bytes: int
    planned_bytes: int
    plans: int


class Alone(NamedTuple):
    """A step of one size under its own plan, and what the plan offloads."""

    step: Executed
    moved_bytes: int


def measure(case: Case) -> CaseFigures:
    sizes = tuple(dict.fromkeys(case.sizes))
    kept = dict(zip(sizes, train_keeping_everything(case, sizes), strict=True))
    budget_bytes = int(BUDGET_SHARE * max(step.peak_bytes for step in kept.values()))
    alone = {size: train_alone(case, size, budget_bytes) for size in sizes if kept[size].peak_bytes > budget_bytes}
    trained = train(case, budget_bytes, is_session_per_step=case.has_session_per_step)
    beside = train(case, budget_bytes, is_session_per_step=False) if case.has_session_per_step else None
    structures = [case.structure(size) for size in case.sizes]
    steps = tuple(
        StepFigures(
            size=size,
            is_first_of_structure=structures[index] not in structures[:index],
            trained=trained.steps[index],
            kept=kept[size],
            alone=alone[size].step if size in alone else kept[size],
        )
        for index, size in enumerate(case.sizes)
    )
    return CaseFigures(
        name=case.name,
        budget_bytes=budget_bytes,
        steps=steps,
        pinned_bytes=trained.pinned_bytes,
        pinned_at_end_bytes=trained.pinned_at_end_bytes,
        planned_bytes=trained.planned_bytes,
        moved_bytes_alone=max((one.moved_bytes for one in alone.values()), default=0),
        plans=trained.plans,
        wall_s=trained.wall_s,
        planning_s=trained.planning_s,
        one_session_ns=None if beside is None else tuple(step.step_ns for step in beside.steps),
    )


def train_keeping_everything(case: Case, sizes: Sequence[Size]) -> list[Executed]:
    """One step of each size without a session. The optimizers have their states, as in all but the first steps."""
    with vdnn.VirtualMachine(HARDWARE) as machine:
        subject = case.make()
        subject.make_states()
        return [_step(machine, subject, size) for size in sizes]


def train(case: Case, budget_bytes: int, *, is_session_per_step: bool) -> Training:
    """All steps of a case under the budget, in one session, or in a session for each step."""
    steps: list[Executed] = []
    pinned_bytes = 0
    with vdnn.VirtualMachine(HARDWARE) as machine, _counted_plans() as planned, _timed_plans() as planning:
        subject = case.make()
        begin_s = time.perf_counter()
        around = None if is_session_per_step else vdnn.offload(budget=budget_bytes, device=machine)
        with around or contextlib.nullcontext():
            for size in case.sizes:
                session = around or vdnn.offload(budget=budget_bytes, device=machine)
                with session if around is None else contextlib.nullcontext():
                    steps.append(_step(machine, subject, size))
                pinned_bytes = max(pinned_bytes, session.host_bytes)
        engine = session._engine
        pinned_at_end = sum(transport.pool.stats.pinned_bytes for transport in engine.transports.opened())
        use = engine.steps.plan_use
        planned_bytes = 0 if use is None else max((plan.offloaded_bytes for plan in use.plans), default=0)
        wall_s = time.perf_counter() - begin_s
        return Training(steps, wall_s, sum(planning), pinned_bytes, pinned_at_end, planned_bytes, planned.call_count)


def train_alone(case: Case, size: Size, budget_bytes: int) -> Alone:
    """Steps of one size, until one keeps within the budget under a plan. All models of the case are on the device."""
    steps: list[Executed] = []
    with vdnn.VirtualMachine(HARDWARE) as machine:
        subject = case.make()
        subject.make_states()
        with vdnn.offload(budget=budget_bytes, device=machine, warmup_steps=0) as session:
            for _ in range(_MOST_STEPS_ALONE):
                had_plan = session.plan is not None
                steps.append(_step(machine, subject, size))
                if had_plan and steps[-1].peak_bytes <= budget_bytes:
                    break
        return Alone(steps[-1], 0 if session.plan is None else session.plan.offloaded_bytes)


def _step(machine: vdnn.VirtualMachine, subject: Subject, size: Size) -> Executed:
    machine.reset_peak()
    begin_ns = machine.now_ns
    subject.train(size)
    return Executed(machine.now_ns - begin_ns, machine.peak_bytes)


def _counted_plans() -> contextlib.AbstractContextManager[mock.MagicMock]:
    """Counts the plans that sessions make. The mock calls through."""
    return mock.patch("vdnn.runtime.steps.planner.plan_step", wraps=plan_step)


@contextlib.contextmanager
def _timed_plans() -> Iterator[list[float]]:
    """The processor times in which sessions make plans, and the steps that these are made for."""
    times: list[float] = []
    plan = PlanMaker._planning

    @contextlib.contextmanager
    def timed(maker: PlanMaker) -> Iterator[None]:
        begin_s = time.process_time()
        try:
            with plan(maker):
                yield
        finally:
            times.append(time.process_time() - begin_s)

    with mock.patch.object(PlanMaker, "_planning", timed):
        yield times
