"""Advice from plans of whole trainings, and on torch's loss in chunks, each with what it gains."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.advisor.programs import evidence_of, found, perceptron, training_of
from vdnn.advisor.advice import Kind
from vdnn.advisor.change import Change
from vdnn.advisor.evidence import Evidence, NotSeen
from vdnn.advisor.parts import WorkloadTraining
from vdnn.hardware import load_profile

CARD = load_profile("rtx-4090")
WIDTH, CLASSES, ROWS = 512, 16384, 2048


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + functional.gelu(self.inner(x))


def stack(batch: int) -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(*(Block() for _ in range(8))), torch.randn(batch, WIDTH)


def evidence_under(budget_bytes: int | None, batch: int = 64) -> Evidence:
    training = WorkloadTraining(stack, batch, name="stack", optimizer="adamw")
    return Evidence(training, CARD, budget_bytes=budget_bytes)


def test_state_that_does_not_fit_is_advised_to_the_host() -> None:
    evidence = evidence_under(None)
    training = evidence.rehearsed_training().training
    state_bytes = sum(unit.state_bytes for unit in training.units)
    parameters = 8 * (WIDTH * WIDTH + WIDTH)
    assert state_bytes == 2 * 4 * parameters + 8 * 2 * 4  # two moments, and a count for each of 16 tensors
    assert found(Kind.TRAINING_PLAN, evidence) == [], "the step fits"
    kept_bytes = evidence.base.peak_bytes
    (advice,) = found(Kind.TRAINING_PLAN, evidence_under(kept_bytes - state_bytes // 2))
    assert "optimizer=optimizer" in advice.action
    assert advice.seen.startswith("optimizer state")
    assert advice.gain.after_bytes is not None
    assert advice.gain.after_bytes <= kept_bytes - state_bytes // 2
    assert advice.gain.saved_ns <= 0


def test_a_card_that_no_plan_fits_is_named_and_not_advised_for() -> None:
    with pytest.raises(NotSeen, match="no plan of the whole training fits"):
        found(Kind.TRAINING_PLAN, evidence_under(1 << 20))


class Words(nn.Module):
    """A head whose logits are the peak, as in language models."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.body(x))
        return logits


def words(batch: int) -> tuple[nn.Module, torch.Tensor, object]:
    target = torch.zeros(batch, dtype=torch.int64)
    return Words(), torch.randn(batch, WIDTH), lambda logits: functional.cross_entropy(logits.view(-1, CLASSES), target)


has_chunked_loss = pytest.mark.skipif(
    not hasattr(nn, "LinearCrossEntropyLoss"), reason="this torch has no LinearCrossEntropyLoss"
)


@has_chunked_loss
def test_logits_that_are_the_peak_lead_to_torchs_loss_in_chunks() -> None:
    evidence = Evidence(WorkloadTraining(words, ROWS, name="words", optimizer="sgd"), CARD)
    assert evidence.base.logits_bytes == 4 * ROWS * CLASSES
    (advice,) = found(Kind.CHUNKED_LOSS, evidence)
    chunked = evidence.step(Change(loss_chunk_rows=ROWS // 8), "")
    # Log softmax, its gradient and that of the logits are there at once. In chunks they take an eighth, but the
    # gradient of the weight is there before.
    assert advice.gain.saved_bytes == evidence.base.peak_bytes - chunked.peak_bytes
    logits_bytes, weight_bytes = 4 * ROWS * CLASSES, 4 * WIDTH * CLASSES
    assert advice.gain.saved_bytes >= 2 * logits_bytes * 7 // 8 - weight_bytes
    assert f"batch_chunk_size={ROWS // 8}" in advice.action
    assert f"LinearCrossEntropyLoss({WIDTH}, {CLASSES}" in advice.action


@has_chunked_loss
def test_a_loss_without_a_large_vocabulary_stays() -> None:
    evidence = evidence_of(training_of(perceptron()))
    assert found(Kind.CHUNKED_LOSS, evidence) == []


@has_chunked_loss
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loss_in_chunks_computes_the_gradients_of_cross_entropy(dtype: torch.dtype) -> None:
    """The advised line, on real tensors: its loss and gradients are those of the linear and cross_entropy."""
    options = nn.LinearCrossEntropyOptions(batch_chunk_size=8, chunking_method=None)
    head = nn.LinearCrossEntropyLoss(16, 64, dtype=dtype, options=options)
    hidden = torch.randn(32, 16, dtype=dtype, requires_grad=True)
    target = torch.randint(64, (32,))
    head(hidden, target).backward()
    plain = hidden.detach().clone().requires_grad_()
    functional.cross_entropy(functional.linear(plain, head.linear.weight), target).backward()
    torch.testing.assert_close(hidden.grad, plain.grad, rtol=2e-2, atol=1e-3)
