"""Advice on unnecessary gradients: those of a bias before a batch norm, and those that are filled with zeros."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

from tests.advisor.programs import BATCH, convolutional, evidence_of, found, perceptron, pictures, training_of
from vdnn.advisor.advice import Basis, Kind
from vdnn.advisor.change import Change
from vdnn.advisor.evidence import Evidence, NotSeen
from vdnn.advisor.virtual_step import rehearse
from vdnn.hardware import load_profile

H100 = load_profile("h100")


def on_pictures(model: nn.Module) -> Evidence:
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    return evidence_of(training_of(model, DataLoader(pictures(), batch_size=BATCH), optimizer))


def test_biases_before_norms_are_named_with_the_difference_of_two_rehearsals() -> None:
    evidence = on_pictures(convolutional(bias=True))
    (advice,) = found(Kind.BIAS_BEFORE_NORM, evidence)
    assert advice.seen.startswith("2 biases are cancelled")
    assert "follows: 0, 3 (0 by 1)." in advice.seen
    without = rehearse(evidence.training, H100, Change(without_biases=("0.bias", "3.bias")))
    assert advice.gain.saved_ns == evidence.base.step_ns - without.step_ns > 0
    state_bytes = 2 * (3 * 8 * 4 + 4)  # for each bias: itself, Adam's two moments, and the step count
    assert advice.gain.saved_bytes >= state_bytes


def test_what_a_model_without_those_biases_takes_is_what_was_predicted() -> None:
    (advice,) = found(Kind.BIAS_BEFORE_NORM, on_pictures(convolutional(bias=True)))
    right = on_pictures(convolutional(bias=False))
    assert (advice.gain.after_ns, advice.gain.after_bytes) == (right.base.step_ns, right.base.peak_bytes)
    assert found(Kind.BIAS_BEFORE_NORM, right) == []


class Branched(nn.Module):
    """The output of the convolution is also read outside the norm, so its bias is needed."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm, self.last = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8 * 36, 10)

    def forward(self, x: torch.Tensor) -> Any:
        made = self.convolution(x)
        return self.last((self.norm(made) + made).flatten(1))


def frozen() -> nn.Module:
    """A norm in eval mode subtracts its running mean, so it does not cancel the bias."""
    model = convolutional(bias=True)
    model[1].eval()
    model[4].eval()
    return model


def layer_norm() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 10), nn.LayerNorm(10))


@pytest.mark.parametrize("make", [Branched, frozen, layer_norm])
def test_a_bias_that_matters_is_not_advised(make: Callable[[], nn.Module]) -> None:
    assert found(Kind.BIAS_BEFORE_NORM, on_pictures(make())) == []


def test_a_product_before_a_norm_counts_too() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 10), nn.BatchNorm1d(10, affine=False))
    (advice,) = found(Kind.BIAS_BEFORE_NORM, on_pictures(model))
    assert "1 bias is cancelled" in advice.seen
    assert "without weights" in advice.seen


def step_that_clears(clear: Callable[[Any, Any], object]) -> Callable[..., None]:
    def step(model: Any, optimizer: Any, batch: Any) -> None:
        functional.cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()
        clear(model, optimizer)

    return step


def by_hand(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()


def clearing(clear: Callable[[Any, Any], object]) -> Evidence:
    return evidence_of(training_of(perceptron(), step=step_that_clears(clear)))


@pytest.mark.parametrize("holder", ["the model", "the optimizer"])
def test_filling_gradients_with_zeros_is_advised_against(holder: str) -> None:
    chosen = 0 if holder == "the model" else 1
    evidence = clearing(lambda *both: both[chosen].zero_grad(set_to_none=False))
    (advice,) = found(Kind.SET_TO_NONE, evidence)
    right = clearing(lambda *both: both[chosen].zero_grad())
    assert advice.gain.after_ns == right.base.step_ns < evidence.base.step_ns
    assert advice.gain.after_bytes == right.base.peak_bytes
    assert "8 gradients" in advice.seen
    assert found(Kind.SET_TO_NONE, right) == []


def test_gradients_filled_by_hand_are_seen_without_a_gain() -> None:
    (advice,) = found(Kind.SET_TO_NONE, clearing(by_hand))
    assert advice.gain.basis is Basis.UNKNOWN
    assert "without zero_grad" in advice.gain.reason


def test_where_the_advisor_clears_them_it_does_not_look() -> None:
    with pytest.raises(NotSeen, match="no step is given"):
        found(Kind.SET_TO_NONE, evidence_of(training_of(perceptron())))
