"""The runtime finds the end of each step, however the training loop is written."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import vdnn
from tests.runtime.rigs.networks import perceptron
from vdnn.runtime.machine.virtual_machine import VirtualMachine
from vdnn.runtime.session.session import Session


@pytest.fixture
def machine() -> Iterator[VirtualMachine]:
    with VirtualMachine("titan-x") as machine:
        yield machine


def opened(machine: VirtualMachine, **options: int) -> Session:
    return vdnn.offload("vdnn-all", device=machine, min_bytes=0, measure=True, **options)


def saves_of_last_step(session: Session) -> int:
    """The number of saves in the recorded step."""
    assert session.recording is not None
    return sum(point.key is not None for point in session.recording.points)


def test_an_optimizers_step_ends_a_step(machine: VirtualMachine) -> None:
    model, x = perceptron(), torch.randn(8, 16)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with opened(machine) as session:
        for done in range(4):
            assert session.num_steps == done
            model(x).sum().backward()
            optimizer.step()
    assert session.num_steps == 4


def test_accumulated_gradients_are_one_step(machine: VirtualMachine) -> None:
    model, x = perceptron(), torch.randn(8, 16)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with opened(machine) as session:
        for _ in range(3):
            for _ in range(4):
                model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert session.num_steps == 3
    one = _saves_of(model, x, machine)
    assert saves_of_last_step(session) == 4 * one


def _saves_of(model: nn.Module, x: torch.Tensor, machine: VirtualMachine) -> int:
    with opened(machine, warmup_steps=0) as session:
        model(x).sum().backward()
    return saves_of_last_step(session)


def forward_forward_backward_backward(model: nn.Module, x: torch.Tensor) -> None:
    losses = [model(x).sum() for _ in range(3)]
    while losses:
        losses.pop().backward()


def one_forward_one_backward(model: nn.Module, x: torch.Tensor) -> None:
    """A pipeline stage of depth 3 with six micro-batches: three forwards, then alternating passes, then the rest."""
    ahead = [model(x).sum() for _ in range(3)]
    for _ in range(3):
        ahead.pop(0).backward()
        ahead.append(model(x).sum())
    while ahead:
        ahead.pop(0).backward()


@pytest.mark.parametrize("schedule", [forward_forward_backward_backward, one_forward_one_backward])
@pytest.mark.parametrize("with_optimizer", [True, False])
def test_several_forwards_before_backwards_are_one_step(
    machine: VirtualMachine, schedule: Callable[[nn.Module, torch.Tensor], None], with_optimizer: bool
) -> None:
    model, x = perceptron(), torch.randn(8, 16)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with opened(machine) as session:
        for _ in range(3):
            schedule(model, x)
            if with_optimizer:
                optimizer.step()
    assert session.num_steps == 3
    batches = 3 if schedule is forward_forward_backward_backward else 6
    assert saves_of_last_step(session) == batches * _saves_of(model, x, machine)


def test_a_program_that_steps_by_hand_says_so(machine: VirtualMachine) -> None:
    model, x = perceptron(), torch.randn(8, 16)
    kept = []
    with opened(machine) as session:
        for _ in range(3):
            loss = model(x.clone()).sum()
            loss.backward(retain_graph=True)
            kept.append(loss)  # its graph stays alive, so nothing else shows where the step ends
            session.step()
    assert session.num_steps == 3
    assert saves_of_last_step(session) == _saves_of(model, x, machine)


def test_leaving_ends_a_step_whose_graphs_are_gone_and_no_other(machine: VirtualMachine) -> None:
    model, x = perceptron(), torch.randn(8, 16)
    with opened(machine) as session:
        loss = model(x).sum()
    assert session.num_steps == 0
    with session:
        loss.backward()
    assert session.num_steps == 1


def test_steps_without_a_save_are_none(machine: VirtualMachine) -> None:
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with opened(machine) as session:
        for _ in range(3):
            optimizer.step()
        session.step()
    assert session.num_steps == 0


def test_an_optimizer_that_comes_late_makes_the_count_begin_anew(machine: VirtualMachine) -> None:
    """Micro-batches before the first optimizer's step look like steps. The recording of one is discarded."""
    model, x = perceptron(), torch.randn(8, 16)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with opened(machine) as session:
        for _ in range(4):
            model(x).sum().backward()
        assert session.recording is not None
        optimizer.step()
        assert session.recording is None
        for _ in range(4):
            model(x).sum().backward()
        optimizer.step()
    assert session.num_steps == 2
    assert saves_of_last_step(session) == 4 * _saves_of(model, x, machine)


def test_an_optimizer_of_another_thread_ends_no_step(machine: VirtualMachine) -> None:
    model, x = perceptron(), torch.randn(8, 16)
    with opened(machine) as session:
        loss = model(x).sum()
        other = [torch.nn.Parameter(torch.ones(2))]
        other[0].grad = torch.ones(2)
        thread = threading.Thread(target=torch.optim.SGD(other, 0.1).step)
        thread.start()
        thread.join()
        assert session.num_steps == 0
        loss.backward()
    assert session.num_steps == 1
