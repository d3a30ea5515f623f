"""Runs plans in virtual time, one after another on one machine with one model, and returns the time and the peak.

It runs one step to warm up and one that counts, for each plan. It makes the model once, and runs equal plans once,
of which a matrix of policies and budgets has many.
"""

from __future__ import annotations

import contextlib
from typing import NamedTuple

from vdnn.hardware import HardwareProfile
from vdnn.runtime.machine.virtual_machine import VirtualMachine
from vdnn.runtime.rehearsal.rehearsal import Subject
from vdnn.runtime.rehearsal.stage import stage
from vdnn.runtime.session.offload import offload
from vdnn.step.plan import Plan, PlannedLifetime


class Executed(NamedTuple):
    step_ns: int
    peak_bytes: int


class ExecutedSteps:
    """The executed steps of one subject on one card. The machine is made for the first plan."""

    def __init__(self, subject: Subject, profile: HardwareProfile) -> None:
        self._subject = subject
        self._profile = profile
        self._entered = contextlib.ExitStack()
        self._done: dict[tuple[PlannedLifetime, ...], Executed] = {}

    def __enter__(self) -> ExecutedSteps:
        return self

    def __exit__(self, *exception: object) -> None:
        self._entered.close()

    def run(self, plan: Plan) -> Executed:
        found = self._done.get(plan.lifetimes)
        if found is None:
            found = self._done[plan.lifetimes] = self._run(plan)
        return found

    def _run(self, plan: Plan) -> Executed:
        if not self._done:
            self._machine = self._entered.enter_context(VirtualMachine(self._profile))
            self._entered.enter_context(stage(self._machine))
            self._staged = self._subject.make()
            self._machine.tracker.track([self._staged.model, self._staged.inputs])
        with offload(plan=plan, device=self._machine, measure=True, warmup_steps=1) as session:
            for _ in range(2):
                self._staged.step()
                session.step()
                self._staged.model.zero_grad(set_to_none=True)
            timeline = session.timeline
        session.close()
        assert timeline is not None, "a session with a plan measures its steps"
        return Executed(timeline.step_ns, timeline.peak_bytes)
