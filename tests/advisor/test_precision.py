"""Advice on mixed precision and tf32: given if matrix products run in float32 and the card is faster at less."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.advisor.programs import evidence_of, found, perceptron, training_of
from vdnn.advisor.advice import Basis, Kind
from vdnn.advisor.change import Change
from vdnn.advisor.virtual_step import rehearse
from vdnn.hardware import load_profile


def wide(width: int = 4096) -> nn.Sequential:
    """A model whose products take longer than their launches: 4096 rows by a million weights."""
    return nn.Sequential(nn.Linear(256, width), nn.Linear(width, width), nn.Linear(width, 10))


def batches(rows: int = 4096) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.randn(rows, 256), torch.randint(10, (rows,)))]


def test_autocast_is_advised_with_the_difference_of_two_rehearsals() -> None:
    training = training_of(wide(), batches())
    evidence = evidence_of(training)
    (advice,) = found(Kind.AMP, evidence)
    plain = rehearse(training, load_profile("h100"), Change())
    cast = rehearse(training, load_profile("h100"), Change(autocast="bfloat16"))
    gain = advice.gain
    assert gain.basis is Basis.PREDICTED
    assert (gain.before_ns, gain.after_ns) == (plain.step_ns, cast.step_ns)
    assert (gain.before_bytes, gain.after_bytes) == (plain.peak_bytes, cast.peak_bytes)
    assert gain.saved_ns > 0
    products = 3 + 2 + 3  # forward; gradients of the inputs, except the first; gradients of the weights
    assert advice.seen.startswith(f"{products} of {products} products")
    assert 'torch.autocast("cuda", torch.bfloat16)' in advice.action


def test_a_card_whose_only_half_is_float16_is_told_of_the_scaler() -> None:
    (advice,) = found(Kind.AMP, evidence_of(training_of(wide(), batches()), "v100-16"))
    assert "torch.float16" in advice.action
    assert "GradScaler" in advice.action


@pytest.mark.parametrize("card", ["titan-x", "k40c"])
def test_a_card_without_a_rate_for_halves_is_not_advised(card: str) -> None:
    evidence = evidence_of(training_of(wide(), batches()), card)
    assert found(Kind.AMP, evidence) == []
    assert found(Kind.TF32, evidence) == []


def test_a_model_in_halves_is_not_advised() -> None:
    model = wide().to(torch.bfloat16)
    evidence = evidence_of(training_of(model, [(one.to(torch.bfloat16), other) for one, other in batches()]))
    assert found(Kind.AMP, evidence) == []
    assert found(Kind.TF32, evidence) == []


def test_a_step_that_has_mixed_precision_for_the_card_is_not_advised() -> None:
    """On a machine without the card, torch turns autocast off, and the products seem to be in float32."""

    def step(model: Any, optimizer: Any, batch: Any) -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = functional.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    before = torch.autocast.__init__
    small, few = wide(1024), batches(256)  # because bfloat16 is slow on many CPUs
    assert found(Kind.AMP, evidence_of(training_of(small, few), "a100-40")), "in float32 it is advised"
    evidence = evidence_of(training_of(small, few, step=step), "a100-40", steps=1)
    assert dict(evidence.base.products) == {"bfloat16": 8}
    assert found(Kind.AMP, evidence) == []
    assert torch.autocast.__init__ is before


def test_a_step_of_ones_own_is_rehearsed_with_autocast_in_the_model() -> None:
    def step(model: Any, optimizer: Any, batch: Any) -> None:
        functional.cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()
        optimizer.zero_grad()

    evidence = evidence_of(training_of(wide(), batches(), step=step))
    (advice,) = found(Kind.AMP, evidence)
    cast = rehearse(evidence.training, load_profile("h100"), Change(autocast="bfloat16"))
    assert dict(cast.products) == {"bfloat16": 8}
    assert advice.gain.after_ns == cast.step_ns < evidence.base.step_ns


def test_where_autocast_takes_longer_it_is_not_advised() -> None:
    """For small layers, the launches of the conversions cost more than the arithmetic saves."""
    evidence = evidence_of(training_of(perceptron()))
    slower = evidence.gain_of(Change(autocast="bfloat16"), "autocast")
    assert slower.saved_ns < 0
    assert found(Kind.AMP, evidence) == []


def test_tf32_is_advised_for_products_and_not_where_it_is_allowed() -> None:
    training = training_of(wide(), batches())
    (advice,) = found(Kind.TF32, evidence_of(training))
    quick = rehearse(training, load_profile("h100"), Change(tf32=True))
    assert advice.gain.after_ns == quick.step_ns
    assert advice.gain.saved_ns > 0
    before = torch.get_float32_matmul_precision()
    assert before == "highest", "as torch has it: a rehearsal puts it back"
    torch.set_float32_matmul_precision("high")
    try:
        assert found(Kind.TF32, evidence_of(training)) == []
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_tf32_advice_follows_the_precision_that_a_program_sets(precision: str) -> None:
    """torch's older switches raise after this."""
    products = torch.backends.cuda.matmul
    before, products.fp32_precision = products.fp32_precision, precision
    try:
        assert len(found(Kind.TF32, evidence_of(training_of(wide(), batches())))) == (precision == "ieee")
        assert products.fp32_precision == precision, "a rehearsal puts it back"
    finally:
        products.fp32_precision = before
