"""The planning thread: the training never waits for a plan, takes up what is done, and ends with its process."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator

import pytest
import torch

import vdnn
from tests.patience import PATIENCE_S
from tests.runtime.rigs.networks import perceptron
from vdnn.errors import BudgetError
from vdnn.planning.planned_step import PlannedStep, plan_step
from vdnn.runtime.machine.virtual_machine import VirtualMachine
from vdnn.runtime.session.session import Session
from vdnn.runtime.steps import planner as planner_module
from vdnn.runtime.steps.planner import BudgetPlanner
from vdnn.runtime.steps.planning_thread import WorkBeside


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are made beside the training, as on a GPU."""
    monkeypatch.setattr(BudgetPlanner, "is_awaited", False)


def work_of(session: Session) -> WorkBeside:
    maker = session._engine.steps._plans._maker  # type: ignore[union-attr]
    assert maker is not None
    return maker.work


# Work.


def test_results_are_taken_up_in_order_and_on_the_thread_that_asks() -> None:
    work, gate, here = WorkBeside(is_awaited=False), threading.Event(), threading.get_ident()
    found: list[object] = []
    work.add(lambda: (gate.wait(PATIENCE_S), threading.get_ident())[1], lambda made: found.append(made))
    work.add(lambda: 2, lambda made: found.append((made, threading.get_ident())))
    work.take_up()
    assert found == []
    assert work.waits == 0
    gate.set()
    work.wait()
    assert found[0] != here
    assert found[1:] == [(2, here)]


def test_an_error_is_raised_where_the_result_is_taken_up() -> None:
    work = WorkBeside(is_awaited=False)
    found: list[int] = []
    work.add(lambda: 1 // 0, found.append)
    work.add(lambda: 1, found.append)
    with pytest.raises(ZeroDivisionError):
        work.wait()
    work.wait()
    assert found == [1]


def test_work_that_is_awaited_is_done_at_once() -> None:
    work = WorkBeside(is_awaited=True)
    found: list[int] = []
    work.add(threading.get_ident, found.append)
    assert found == [threading.get_ident()]


def test_what_was_forgotten_is_not_taken_up() -> None:
    work = WorkBeside(is_awaited=False)
    found: list[int] = []
    work.add(lambda: 1, found.append)
    work.forget()
    work.wait()
    assert found == []


# Plans.


class Gate:
    """Holds every plan back until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened = threading.Event()
        self.threads: set[int] = set()
        monkeypatch.setattr(planner_module, "plan_step", self._plan)

    def _plan(self, *arguments: object, **options: object) -> PlannedStep:
        assert self.opened.wait(PATIENCE_S), "nobody opened the gate"
        self.threads.add(threading.get_ident())
        return plan_step(*arguments, **options)  # type: ignore[arg-type]


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch, beside: None) -> Iterator[Gate]:
    held = Gate(monkeypatch)
    yield held
    held.opened.set()


def steps_of(session: Session, machine: VirtualMachine) -> Iterator[int]:
    """Trains on, and yields the peak of each step."""
    model = perceptron(64, 12)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    while True:
        machine.reset_peak()
        with session:
            model(torch.zeros(256, 64)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        yield machine.peak_bytes


def test_the_training_goes_on_while_its_plan_is_made(gate: Gate) -> None:
    with VirtualMachine("titan-x") as machine:
        session = vdnn.offload(budget="900KiB", device=machine, min_bytes=0)
        steps = steps_of(session, machine)
        peaks = [next(steps) for _ in range(6)]
        assert session.plan is None
        assert max(peaks) <= 900 << 10, "a guard keeps the budget until then"
        assert session._engine.steps.plan_use is not None
        assert session._engine.steps.plan_use.recorded == 1, "one recording is enough"
        assert work_of(session).waits == 0
        gate.opened.set()
        session.wait_for_plans()
        assert next(steps) <= 900 << 10
        assert session.plan is not None
        assert threading.get_ident() not in gate.threads


def test_the_same_steps_follow_the_same_plans_if_plans_are_awaited(beside: None) -> None:
    def trained() -> tuple[list[int], list[int], str]:
        with VirtualMachine("titan-x") as machine:
            model = perceptron(64, 12)
            peaks, times = [], []
            with vdnn.offload(budget="900KiB", device=machine, min_bytes=0) as session:
                for size in (256, 256, 192, 320, 256, 288, 128, 320):
                    machine.reset_peak()
                    begin_ns = machine.now_ns
                    model(torch.zeros(size, 64)).square().sum().backward()
                    session.step()
                    session.wait_for_plans()
                    peaks.append(machine.peak_bytes)
                    times.append(machine.now_ns - begin_ns)
            assert session.plan is not None
            return peaks, times, session.report()

    assert trained() == trained()


def test_a_budget_that_cannot_be_met_is_refused_at_a_later_step(beside: None) -> None:
    with VirtualMachine("titan-x") as machine:
        model = perceptron(64, 12)
        with vdnn.offload(budget="300KiB", device=machine, min_bytes=0) as session:

            def train() -> None:
                model(torch.zeros(256, 64)).square().sum().backward()
                session.step()

            train()
            session.wait_for_plans()  # a step of the warm-up refuses nothing
            train()
            with pytest.raises(BudgetError):
                session.wait_for_plans()
            train()  # is recorded again
            with pytest.raises(BudgetError):
                session.wait_for_plans()


def test_gradients_are_the_same_bits_while_plans_come_at_any_time(beside: None) -> None:
    def trained(budget: str | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        with VirtualMachine("titan-x", fake=False) as machine:
            model = perceptron(64, 12)
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            policy = "keep" if budget is None else "auto"
            with vdnn.offload(policy, budget=budget, device=machine, min_bytes=0) as session:
                for number in range(40):
                    model(torch.randn(64 + 64 * (number % 4), 64)).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    time.sleep(0.02 * (number % 3 == 0))  # a plan may come here, or later
            assert budget is None or work_of(session).waits == 0
            return [one.detach().clone() for one in model.parameters()]

    assert all(map(torch.equal, trained(None), trained("700KiB")))


# Processes.

_BUSY = """
    import threading, time
    import vdnn
    from vdnn.runtime.steps.planning_thread import WorkBeside
    begun = threading.Event()
    def plan():
        begun.set()
        while True:
            sum(range(1000))
    work = WorkBeside(is_awaited=False)
    work.add(plan, print)
    work.add(plan, print)
    begun.wait()
"""


def ended(script: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(script)]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


def test_the_process_ends_in_the_middle_of_a_plan() -> None:
    done = ended(_BUSY)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_an_error_ends_the_process_in_the_middle_of_a_plan() -> None:
    done = ended(_BUSY + "    raise KeyboardInterrupt\n")
    assert done.returncode != 0
    assert "KeyboardInterrupt" in done.stderr
    assert "FATAL" not in done.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_has_a_thread_of_its_own() -> None:
    done = ended(
        _BUSY.replace("while True:", "while not done.is_set():").replace("begun =", "done = begun =")
        + """
    import os
    child = os.fork()
    if child == 0:
        found = []
        other = WorkBeside(is_awaited=False)
        other.add(lambda: 3, found.append)
        other.wait()
        os._exit(found[0])
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    )
    assert done.stdout.split() == ["3"], done.stderr
