"""Advice for a step that does not fit: each remedy with its cost. A step that fits gets the largest batch instead."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.advisor.programs import WIDTH, evidence_of, found, perceptron, training_of
from vdnn.advisor.advice import Kind, Per
from vdnn.advisor.change import Change
from vdnn.advisor.evidence import Evidence, NotSeen
from vdnn.advisor.examination import examine
from vdnn.advisor.parts import WorkloadTraining
from vdnn.advisor.virtual_step import rehearse, repeated_blocks
from vdnn.hardware import load_profile

pytestmark = pytest.mark.slow

# A card of which libraries keep nothing: the steps here are smaller than what they keep.
H100 = replace(load_profile("h100"), libraries={})
ROWS = 4096
MAKES_IT_FIT = (Kind.LARGEST_BATCH, Kind.OFFLOAD, Kind.CHECKPOINTING, Kind.ACCUMULATION)


class Block(nn.Module):
    """A block that saves three tensors of its input's size."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Sigmoid())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x)
        return out


def stack(batch: int) -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(*(Block() for _ in range(4))), torch.randn(batch, WIDTH)


def evidence_under(budget_bytes: int | None) -> Evidence:
    return Evidence(WorkloadTraining(stack, ROWS, name="stack"), H100, budget_bytes=budget_bytes)


@pytest.fixture(scope="module")
def tight() -> Evidence:
    """Evidence under a budget of five sixths of the step's peak."""
    return evidence_under(evidence_under(None).base.peak_bytes * 5 // 6)


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        (Kind.OFFLOAD, None),
        (Kind.CHECKPOINTING, Change(checkpointed=True)),
        (Kind.ACCUMULATION, Change(micro_batches=2)),
    ],
)
def test_each_way_to_fit_is_advised_with_its_cost(kind: Kind, change: Change | None, tight: Evidence) -> None:
    (advice,) = found(kind, tight)
    alone = rehearse(tight.training, H100, change or Change(offload_bytes=tight.budget_bytes))
    gain = advice.gain
    assert (gain.before_ns, gain.after_ns) == (tight.base.step_ns, alone.step_ns)
    assert (gain.before_bytes, gain.after_bytes) == (tight.base.peak_bytes, alone.peak_bytes)
    assert alone.peak_bytes <= tight.budget_bytes < tight.base.peak_bytes
    assert gain.saved_ns < 0, "it takes longer, and says so"
    assert "longer" in str(gain)


def test_what_does_not_make_it_fit_is_not_advised(tight: Evidence) -> None:
    least = evidence_under(rehearse(tight.training, H100, Change(checkpointed=True)).peak_bytes - 1)
    assert found(Kind.CHECKPOINTING, least) == []
    nothing = evidence_under(1 << 20)  # less than the parameters alone
    assert [found(kind, nothing) for kind in MAKES_IT_FIT] == [[], [], [], []]


def test_of_a_step_that_fits_nothing_is_made_slower() -> None:
    evidence = evidence_under(None)
    assert [found(kind, evidence) for kind in MAKES_IT_FIT[1:]] == [[], [], []]


def test_what_makes_it_fit_comes_first(tight: Evidence) -> None:
    advices = examine(tight.training, H100, budget=tight.budget_bytes)
    flags = [one.makes_it_fit for one in advices]
    assert flags == sorted(flags, reverse=True)
    assert {one.kind for one in advices if one.makes_it_fit} >= set(MAKES_IT_FIT)
    assert "which does not fit" in str(advices)


def test_blocks_are_the_outermost_that_repeat() -> None:
    model = stack(1)[0]
    assert repeated_blocks(model) == list(model.children())
    assert repeated_blocks(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))) == [], "layers are no blocks"
    assert repeated_blocks(nn.Sequential(nn.Sequential(model), nn.Sequential(stack(1)[0])))[0] is model[0]


@pytest.mark.parametrize("budget_bytes", [30 << 20, 300 << 20])
def test_the_largest_batch_fits_and_one_more_does_not(budget_bytes: int) -> None:
    evidence = evidence_under(budget_bytes)
    (advice,) = found(Kind.LARGEST_BATCH, evidence)
    batch = int(advice.seen.split("; ")[1].split()[0])
    assert rehearse(evidence.training, H100, Change(batch=batch)).peak_bytes <= budget_bytes
    assert rehearse(evidence.training, H100, Change(batch=batch + 1)).peak_bytes > budget_bytes
    larger = rehearse(evidence.training, H100, Change(batch=batch))
    assert advice.gain.per is Per.SAMPLES
    assert advice.gain.after_ns == round(larger.step_ns * ROWS / batch)
    assert advice.gain.before_ns == evidence.base.step_ns


def test_a_batch_is_no_larger_than_the_data() -> None:
    training = training_of(perceptron())  # batches of 16 out of 64 samples
    (advice,) = found(Kind.LARGEST_BATCH, evidence_of(training))
    assert "all the data fits" in advice.seen
    assert advice.action.startswith("a batch of up to 64")


def test_a_batch_that_wins_no_time_is_not_advised() -> None:
    """The batch already fills the card, so a larger one only uses more memory."""
    training = WorkloadTraining(stack, 1 << 19, name="stack")
    evidence = Evidence(training, H100)
    assert evidence.fits
    assert found(Kind.LARGEST_BATCH, evidence) == []


def test_memory_that_does_not_grow_with_the_batch_is_not_searched() -> None:
    training = WorkloadTraining(lambda batch: (perceptron(1), torch.randn(4, WIDTH)), 4, name="fixed")
    with pytest.raises(NotSeen, match="does not depend on the batch"):
        found(Kind.LARGEST_BATCH, Evidence(training, H100))
