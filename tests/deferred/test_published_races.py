"""Every published race is caught here: as a violation, as wrong gradients, or as both. Its mended twin causes neither.

A step follows a pipeline: half of a backward, the forward of the next batch, the other half, and the second backward.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from deferred import DeferredAccelerator, Mode
from tests.deferred.faulty_offloaders import (
    ClonesOnTheTransferStream,
    DeletedWhileAViewIsUsed,
    Naive,
    Offloader,
    OneCopyByAddress,
    PoolWithoutItsReaders,
    ReloadsBeforeItsOffload,
    StreamOfConstruction,
    WaitsForItself,
)
from tests.runtime.rigs.networks import perceptron

SEEDS = 50
WIDTH = 16  # and the number of samples: a transpose then has the size of its original
OFFLOADERS = [
    Naive,
    DeletedWhileAViewIsUsed,
    StreamOfConstruction,
    ClonesOnTheTransferStream,
    ReloadsBeforeItsOffload,
    WaitsForItself,
    PoolWithoutItsReaders,
    OneCopyByAddress,
]


class SquaredLoss(torch.autograd.Function):
    """Half the sum of squares. As fused losses do, it saves its gradient and returns the saved tensor itself."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x.clone())
        return x.square().sum() / 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (saved,) = ctx.saved_tensors
        view: torch.Tensor = saved.view_as(saved)
        return view


class Layers(nn.Module):
    """Two halves. The second half multiplies a map by its transpose, and multiplies the two halves of a map, one of
    which has an offset."""

    def __init__(self) -> None:
        super().__init__()
        self.first = perceptron(WIDTH, depth=2)
        self.second = nn.Linear(WIDTH, 2 * WIDTH)

    def loss(self, hidden: torch.Tensor) -> torch.Tensor:
        left, right = self.second(hidden @ hidden.t()).chunk(2, 1)
        loss: torch.Tensor = SquaredLoss.apply(left * right)
        return loss


def train(model: Layers, batches: Sequence[torch.Tensor], hooks: Callable[[], Any]) -> list[torch.Tensor]:
    """Runs a step. Returns its gradients, on the CPU."""
    with hooks():
        early = model.first(batches[0])
        cut = early.detach().requires_grad_()
        loss = model.loss(cut)
    (between,) = torch.autograd.grad(loss, cut, retain_graph=False)
    with hooks():
        second_loss = model.loss(model.first(batches[1]))
    early.backward(between)
    second_loss.backward()
    return [weight.grad for weight in model.parameters() if weight.grad is not None]


def fill_with_nan(accelerator: DeferredAccelerator) -> None:
    """Overwrites the numbers of the last accelerator. Otherwise a read that comes too early might still find the right
    ones."""
    whole = accelerator.memory.capacity_bytes
    torch.full((whole,), 255, dtype=torch.uint8, device="deferred")
    with torch.Stream(device="deferred"):  # takes all memory from the first stream, which then takes it back
        torch.empty(whole, dtype=torch.uint8, device="deferred")
    torch.empty(1, device="deferred")


class Findings(NamedTuple):
    are_wrong: bool
    violations: Sequence[Any]


class Race:
    """The same step on the CPU and on the accelerator, under an offloader's hooks."""

    def __init__(self) -> None:
        torch.manual_seed(5)
        self.model = Layers()
        self.batches = [torch.randn(WIDTH, WIDTH) for _ in range(2)]
        self.expected = train(copy.deepcopy(self.model), self.batches, contextlib.nullcontext)

    def run(self, make: Callable[[], Any], mode: Mode, seed: int, *, on_a_side_stream: bool = False) -> Findings:
        with DeferredAccelerator(mode, seed=seed, capacity="1MiB") as accelerator:
            fill_with_nan(accelerator)
            model = copy.deepcopy(self.model).to("deferred")
            batches = [batch.to("deferred") for batch in self.batches]
            offloader = make()
            first = torch.accelerator.current_stream()
            computing = torch.Stream(device="deferred") if on_a_side_stream else first
            computing.wait_event(first.record_event())
            with computing:
                gradients = train(model, batches, lambda: offloader)
                if isinstance(offloader, Offloader):
                    offloader.end_of_step()
            first.wait_event(computing.record_event())
            are_wrong = any(
                not torch.equal(gradient.cpu(), expected)
                for gradient, expected in zip(gradients, self.expected, strict=True)
            )
            accelerator.synchronize()
            violations = list(accelerator.violations)
        return Findings(are_wrong, violations)

    def run_offloader(self, offloader: type[Offloader], mode: Mode, seed: int, *, mended: bool) -> Findings:
        aside = offloader is StreamOfConstruction
        return self.run(lambda: offloader(mended=mended), mode, seed, on_a_side_stream=aside)


@pytest.fixture(scope="module")
def race() -> Race:
    return Race()


SCHEDULES = [(Mode.RANDOM, seed) for seed in range(SEEDS)] + [(mode, 0) for mode in Mode if mode is not Mode.RANDOM]


@pytest.mark.parametrize("offloader", OFFLOADERS)
def test_a_published_race_is_caught(race: Race, offloader: type[Offloader]) -> None:
    first = race.run_offloader(offloader, Mode.RANDOM, 0, mended=False)
    if offloader is OneCopyByAddress:
        assert first.are_wrong, "its order is right: only the numbers tell"
        assert not first.violations
        return
    assert first.violations, "the checker needs no luck"
    wrong = (seed for seed in range(SEEDS) if race.run_offloader(offloader, Mode.RANDOM, seed, mended=False).are_wrong)
    assert next(wrong, None) is not None, "no seed made wrong gradients of it"


@pytest.mark.parametrize("offloader", OFFLOADERS)
def test_its_mended_twin_is_right(race: Race, offloader: type[Offloader]) -> None:
    for mode, seed in SCHEDULES:
        findings = race.run_offloader(offloader, mode, seed, mended=True)
        assert not findings.are_wrong, (mode, seed)
        assert not findings.violations, (mode, seed)


def test_a_violation_names_both_operations_and_their_streams(race: Race) -> None:
    (violation,) = race.run_offloader(PoolWithoutItsReaders, Mode.RANDOM, 0, mended=False).violations
    assert "read by aten::copy_" in violation.first
    assert "write by aten::copy_" in violation.second
    assert (violation.first_stream, violation.second_stream) == ("side 3", "side 2")


def test_torchs_own_save_on_cpu_is_right(race: Race, mode: Mode) -> None:
    for seed in range(5):
        findings = race.run(torch.autograd.graph.save_on_cpu, mode, seed)
        assert findings == Findings(are_wrong=False, violations=[])
