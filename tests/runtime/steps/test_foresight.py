"""A step that no plan can fit into the budget is refused as it begins, where two recorded steps tell its size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

import vdnn
from tests.runtime.rigs.networks import perceptron
from tests.runtime.steps.test_changing_shapes import language_model
from vdnn.errors import BudgetError
from vdnn.planning.least_memory import least_bytes
from vdnn.runtime.machine.virtual_machine import VirtualMachine
from vdnn.step.lower_estimate import lower_estimate
from vdnn.step.made_steps import first_save
from vdnn.step.recording import Recording

BUDGET_BYTES = 1200 << 10

Inputs = Callable[[int], torch.Tensor]


def convolutions() -> nn.Module:
    layers = [layer for _ in range(4) for layer in (nn.Conv2d(8, 8, 3, padding=1), nn.GELU())]
    return nn.Sequential(*layers, nn.AvgPool2d(2), nn.Conv2d(8, 4, 1))


def images(size: int) -> torch.Tensor:
    return torch.zeros(2, 8, size, size)


def rows(batch: int) -> torch.Tensor:
    return torch.zeros(batch, 64)


def tokens(length: int) -> torch.Tensor:
    return torch.zeros(4, length, dtype=torch.int64)


def recorded(machine: VirtualMachine, model: nn.Module, inputs: torch.Tensor) -> Recording:
    with vdnn.offload("vdnn-all", device=machine, min_bytes=0, measure=True) as session:
        for _ in range(2):
            model(inputs).square().sum().backward()
            model.zero_grad()
            session.step()
    assert session.recording is not None
    return session.recording


# The estimate.


@pytest.mark.parametrize(
    ("make", "inputs", "sizes"),
    [
        (lambda: perceptron(64, 4), rows, (64, 96, 400)),
        (language_model, tokens, (64, 96, 256)),  # the maps of attention grow with the square
        (convolutions, images, (16, 24, 64)),  # two dimensions at once
    ],
)
def test_the_estimate_is_no_larger_than_the_step_and_larger_than_those_recorded(
    make: Callable[[], nn.Module], inputs: Inputs, sizes: tuple[int, int, int]
) -> None:
    with VirtualMachine("titan-x") as machine:
        model = make()
        small, large, real = (recorded(machine, model, inputs(size)) for size in sizes)
    estimate = lower_estimate(small, large, first_save(real))
    assert estimate is not None
    assert least_bytes(large) < least_bytes(estimate) <= least_bytes(real)


def test_there_is_no_estimate_where_something_else_grew_or_the_step_is_not_larger() -> None:
    with VirtualMachine("titan-x") as machine:
        model = perceptron(64, 4)
        small, large, real = (recorded(machine, model, rows(batch)) for batch in (64, 96, 400))
    first = first_save(real)
    assert lower_estimate(small, large, first) is not None
    assert lower_estimate(small, large, first_save(small)) is None
    assert lower_estimate(large, small, first) is None
    assert lower_estimate(small, large, replace(first, size=(400, 32))) is None, "another dimension is smaller"
    assert lower_estimate(small, large, replace(first, size=(400, 64, 1))) is None
    lifetimes = (*large.lifetimes[:-1], replace(large.lifetimes[-1], nbytes=5 * large.lifetimes[-1].nbytes))
    assert lower_estimate(small, replace(large, lifetimes=lifetimes), first) is None


def test_a_workspace_that_appears_is_not_extrapolated() -> None:
    with VirtualMachine("titan-x") as machine:
        model = perceptron(64, 4)
        small, large, real = (recorded(machine, model, rows(batch)) for batch in (64, 96, 400))
    workspace_bytes = 100 << 20
    points = tuple(replace(point, peak_bytes=point.peak_bytes + workspace_bytes) for point in large.points)
    estimate = lower_estimate(small, replace(large, points=points), first_save(real))
    assert estimate is not None
    assert workspace_bytes < least_bytes(estimate) <= least_bytes(real) + workspace_bytes


# The session.


def refused(batches: list[int]) -> dict[int, tuple[BudgetError, int]]:
    """The batches that were refused, with the errors and the peaks of their steps."""
    errors: dict[int, tuple[BudgetError, int]] = {}
    with VirtualMachine("titan-x") as machine:
        model = perceptron(64, 12)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with vdnn.offload(budget=BUDGET_BYTES, device=machine, min_bytes=0) as session:
            for number, batch in enumerate(batches):
                machine.reset_peak()
                try:
                    model(rows(batch)).square().sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                except BudgetError as error:
                    errors[number] = error.with_traceback(None), machine.peak_bytes  # a traceback holds the batch
                else:
                    assert machine.peak_bytes <= BUDGET_BYTES
        assert session.num_steps == len(batches) - len(errors)
    return errors


def test_a_step_that_cannot_fit_is_refused_before_its_peak_and_the_next_one_runs() -> None:
    errors = refused([256, 256, 300, 4000, 256, 300])
    assert list(errors) == [3]
    error, peak_bytes = errors[3]
    assert error.budget_bytes == BUDGET_BYTES < error.least_bytes
    assert peak_bytes <= BUDGET_BYTES, "nothing but the batch itself was allocated"
    message = str(error)
    assert message.startswith("budget 1.17 MiB cannot be met: at least ")
    assert (
        "its first save is [4000, 64]. The estimate is from recorded steps with first saves of [256, 64] and "
        in message
    )
    assert "[300, 64]; steps with up to [300, 64] have plans. Raise the budget, or make the batch smaller." in message


def test_a_step_that_may_fit_runs() -> None:
    assert refused([256, 256, 300, 900, 1000]) == {}


def test_one_recorded_size_tells_nothing_of_larger_ones() -> None:
    assert refused([256, 256, 1000]) == {}
