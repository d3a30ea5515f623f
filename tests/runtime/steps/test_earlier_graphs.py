"""Graphs that outlive their step: later steps stay within the budget, and what the graphs hold stays right."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

import vdnn
from vdnn.errors import BudgetError
from vdnn.runtime.machine.virtual_machine import VirtualMachine
from vdnn.runtime.session.session import Session
from vdnn.runtime.steps.earlier_graphs import naming_earlier_graphs

ROWS, WIDTH = 512, 64
HELD_STEP, LARGER_STEP, USED_STEP, STEPS = 14, 18, 20, 23
KiB = 1 << 10


@dataclass
class Trained:
    peaks: list[int] = field(default_factory=list)
    begins: list[int] = field(default_factory=list)  # what was allocated as each step began
    gradients: list[torch.Tensor] = field(default_factory=list)
    session: Session | None = None


def trained(
    budget: int | None = None, *, held: str = "", is_used: bool = False, fake: bool = True, recompute: bool = True
) -> Trained:
    """`held`: what the program keeps of one step. `is_used`: a backward pass of a later step uses that graph."""
    with torch.random.fork_rng(), VirtualMachine("h100", fake=fake) as machine:
        torch.manual_seed(0)
        model = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())))
        result = Trained()
        history: list[torch.Tensor] = []
        if budget is not None:
            result.session = vdnn.offload(budget=budget, device=machine, min_bytes=4 * KiB, recompute=recompute)
        with result.session or contextlib.nullcontext():
            for step in range(STEPS):
                result.begins.append(machine.allocated_bytes)
                machine.reset_peak()
                rows = ROWS * 4 // 3 if step == LARGER_STEP else ROWS
                if held == "output" and step == HELD_STEP:
                    history.append(model(torch.randn(rows, WIDTH)).square().mean())
                loss = model(torch.randn(rows, WIDTH)).square().mean()
                loss.backward(retain_graph=held == "loss" and step == HELD_STEP)  # type: ignore[no-untyped-call]
                if held == "loss" and step == HELD_STEP:
                    history.append(loss)
                if is_used and step == USED_STEP:
                    history.pop().backward()
                del loss
                if not fake:
                    result.gradients += [one.grad for one in model.parameters() if one.grad is not None]
                model.zero_grad()
                if result.session is not None:
                    result.session.step()
                result.peaks.append(machine.peak_bytes)
        return result


@functools.cache
def kept_peak_bytes() -> int:
    return max(trained().peaks)


def budget_of(share: float) -> int:
    return int(share * kept_peak_bytes())


DRAWN = ((0.6, "output", True), (0.8, "loss", True), (0.8, "output", False), (0.6, "loss", False))
CASES = [
    pytest.param(*case, marks=[] if case in DRAWN else [pytest.mark.full])
    for case in itertools.product((0.6, 0.8), ("output", "loss"), (True, False))
]


@pytest.mark.drawn(of=2)
@pytest.mark.parametrize(("share", "held", "recompute"), CASES)
def test_steps_after_a_held_graph_stay_within_the_budget(share: float, held: str, recompute: bool) -> None:
    budget = budget_of(share)
    result = trained(budget, held=held, recompute=recompute)
    assert [peak for peak in result.peaks[HELD_STEP + 2 :] if peak > budget * 1.02] == []
    assert [peak for peak in result.peaks[:HELD_STEP] if peak > budget] == []


def test_what_a_step_evicts_beside_a_held_graph_returns_ahead_of_its_use() -> None:
    result = trained(budget_of(0.8), held="output", recompute=False)
    assert result.session is not None
    (line,) = [line for line in result.session.report().splitlines() if "ahead of a use" in line]
    assert line.endswith(" ahead of a use, 0 on demand")


def test_what_a_held_graph_keeps_is_evicted_only_if_a_step_needs_its_memory() -> None:
    ample = trained(4 * kept_peak_bytes(), held="output", recompute=False)
    assert ample.session is not None
    assert ample.session.counters.storages == 0


@pytest.mark.slow
@pytest.mark.drawn(of=2)
@pytest.mark.parametrize(("held", "recompute"), [("output", False), ("loss", True)])
def test_an_evicted_graph_has_the_same_gradients(held: str, recompute: bool) -> None:
    plain = trained(held=held, is_used=True, fake=False)
    ours = trained(budget_of(0.7), held=held, is_used=True, fake=False, recompute=recompute)
    assert ours.session is not None
    assert ours.session.counters.storages > 0
    assert len(plain.gradients) == len(ours.gradients) > 0
    assert all(map(torch.equal, plain.gradients, ours.gradients))


@pytest.mark.slow
def test_saves_of_the_gate_leave_the_device_with_their_graph() -> None:
    """A plan that only moves settles, so the native gate has kept the saves of the held graph."""
    result = trained(budget_of(0.8), held="output", recompute=False)
    kept_bytes = 16 * ROWS * WIDTH * 4
    assert result.begins[HELD_STEP + 3] - result.begins[HELD_STEP] < kept_bytes // 4


def test_a_late_step_that_no_plan_fits_ends_no_training(caplog: pytest.LogCaptureFixture) -> None:
    """Only the session of a first step that cannot fit raises. Here plans went well, and one larger step comes."""
    budget = 600 * KiB
    rows = [256] * 6 + [1000] + [256] * 3
    with VirtualMachine("h100") as machine, caplog.at_level(logging.WARNING, logger="vdnn"):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))
        with vdnn.offload(budget=budget, device=machine, min_bytes=4 * KiB) as session:
            for number in rows:
                model(torch.zeros(number, WIDTH)).square().mean().backward()
                model.zero_grad()
                session.step()
            report = session.report()
    assert "needs more than the budget even with everything offloaded" in report or "before there was a plan" in report
    assert "9 of 10 steps within, 1 over" in report
    assert "get no plan, and may exceed the budget: budget 600.00 KiB cannot be met" in caplog.text


# The error.


def make_error(**more: int) -> BudgetError:
    return BudgetError(
        budget_bytes=4 * KiB, least_bytes=9 * KiB, where="point 3", resident_bytes=8 * KiB, way_out="", **more
    )


def test_the_error_names_graphs_of_earlier_steps_and_what_to_do() -> None:
    message = str(naming_earlier_graphs(make_error(), 6 * KiB))
    assert "8.00 KiB were allocated when the step began, 6.00 KiB of them held by graphs of earlier steps." in message
    assert message.endswith("Free the outputs and losses of earlier steps, or keep what detach() returns of them.")
    assert "graphs" not in str(make_error())
