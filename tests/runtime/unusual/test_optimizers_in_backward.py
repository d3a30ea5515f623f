"""Optimizers that step within the backward do not end the step, which is planned as a whole. See issue #14."""

from __future__ import annotations

import threading

import pytest
import torch

import vdnn
from tests.runtime.unusual.every_mode import MODES, assert_same_in
from tests.runtime.unusual.loops_in_backward import IN_BACKWARD, one_for_each_parameter
from tests.runtime.unusual.small_networks import deep
from vdnn.runtime.machine.virtual_machine import VirtualMachine

pytestmark = pytest.mark.slow

PROGRAMS = pytest.mark.parametrize("program", IN_BACKWARD)


@pytest.mark.drawn(of=2)
@pytest.mark.parametrize("mode", MODES)
@PROGRAMS
def test_it_trains_as_plain_torch_does(program: str, mode: str) -> None:
    assert_same_in(mode, IN_BACKWARD[program])


@PROGRAMS
def test_a_step_is_a_whole_pass(program: str) -> None:
    with VirtualMachine("titan-x", fake=False) as machine:
        step = IN_BACKWARD[program]()
        with vdnn.offload("vdnn-all", device=machine, min_bytes=0, measure=True) as session:
            for index in range(6):
                step(index)
    # Three batches before the first optimizer's step look like steps. The count begins again at that step.
    assert session.num_steps == 6


@PROGRAMS
def test_under_the_least_budget_every_planned_step_takes_what_was_said(program: str) -> None:
    with VirtualMachine("titan-x", fake=False) as machine:
        step = IN_BACKWARD[program]()
        with vdnn.offload(budget="min", device=machine, min_bytes=0) as session:
            for index in range(8):
                step(index)
                if index >= 4:
                    # A step that ends in a backward is over at the next save.
                    assert session.plan is not None
        assert session.timeline is not None
        assert session.plan is not None
        assert session.timeline.peak_bytes <= (session.plan.budget_bytes or 0)
        assert session.plan.offloaded_bytes or any(one.is_recomputed for one in session.plan.lifetimes)


def test_an_optimizer_that_steps_on_a_thread_of_the_backward_counts() -> None:
    """As on a GPU: the runtime knows the parameters that the optimizer trains, but not the thread."""
    with VirtualMachine("titan-x", fake=False) as machine:
        model, strange = deep(), deep()
        optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, strange)]

        def on_a_thread(gradient: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
            x = torch.ones(1, requires_grad=True)
            x.register_hook(lambda _: optimizer.step())
            thread = threading.Thread(target=(2 * x).sum().backward)
            thread.start()
            thread.join()

        seen = []
        for optimizer in optimizers:
            with vdnn.offload("vdnn-all", device=machine, min_bytes=0, measure=True) as session:
                model(torch.randn(4, 16)).sum().backward()
                assert session._engine.steps is not None
                on_a_thread(torch.ones(1), optimizer)
                seen.append(session._engine.steps._ends._first_optimizer is not None)
            session.close()
    assert seen == [True, False]


def test_without_a_session_nothing_is_left_of_it() -> None:
    """The hook of a closed session counts nothing."""
    with VirtualMachine("titan-x", fake=False) as machine:
        with vdnn.offload("vdnn-all", device=machine, min_bytes=0, measure=True) as session:
            step = one_for_each_parameter()()
            step(0)
        done = session.num_steps
        step(1)
    assert session.num_steps == done == 1
