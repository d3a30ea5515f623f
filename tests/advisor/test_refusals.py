"""vdnn.advise refuses what is not a training, and says what was expected and what was passed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import vdnn
from tests.advisor.programs import BATCH, WIDTH, perceptron, training_of
from vdnn.advisor.advice import Advice, Basis, Gain, Kind, unknown
from vdnn.advisor.examination import examine
from vdnn.advisor.parts import WorkloadTraining
from vdnn.errors import VdnnError
from vdnn.hardware import load_profile

MODEL = perceptron(1)
SGD = "torch.optim.SGD"  # one is made by the test: the first one of a process imports torch's compiler
PAIR = (torch.randn(BATCH, WIDTH), torch.randint(10, (BATCH,)))


def frozen() -> nn.Module:
    return perceptron(1).requires_grad_(False)


@pytest.mark.parametrize(
    ("given", "options", "sentence"),
    [
        (("model", [PAIR], SGD), {}, "model: expected a torch.nn.Module, got str."),
        ((nn.Tanh(), [PAIR], SGD), {}, "expected one with parameters to train, got Tanh with 0"),
        ((frozen(), [PAIR], SGD), {}, "none of which requires grad"),
        ((MODEL, [PAIR], "sgd"), {}, "optimizer: expected a torch.optim.Optimizer, got str."),
        ((MODEL, iter([PAIR]), SGD), {}, "can be iterated more than once"),
        ((MODEL, 7, SGD), {}, "such as a DataLoader or a list of batches, got int"),
        ((MODEL, [PAIR], SGD), {"loss": functional.cross_entropy, "step": print}, "a loss or a step, got both"),
        ((MODEL, [PAIR], SGD), {"loss": 3}, "loss: expected a function, got int."),
        ((MODEL, [], SGD), {}, "loader: expected at least one batch, got none."),
        ((MODEL, ["text"], SGD), {}, "loader: expected batches with tensors, got one of type str."),
        ((MODEL, [(*PAIR, PAIR[1])], SGD), {}, "others need step=, a function of (model, optimizer, batch)"),
        ((MODEL, [PAIR], SGD), {}, "loss: expected a function, because Tensor has no loss, got none."),
        ((MODEL, [PAIR], SGD), {"loss": lambda out, y: out}, "expected a tensor of one number, got one of shape"),
        ((MODEL, [PAIR], SGD), {"loss": lambda out, y: 1.0}, "loss: expected a tensor of one number, got float."),
        ((MODEL, [PAIR], SGD), {"steps": True}, "steps: expected a number of steps, 0 or more, got True."),
    ],
)
def test_what_is_no_training_is_refused(given: tuple[Any, ...], options: dict[str, Any], sentence: str) -> None:
    model, loader, optimizer = given
    optimizer = torch.optim.SGD(MODEL.parameters(), lr=0.1) if optimizer is SGD else optimizer
    with pytest.raises((VdnnError, TypeError, ValueError)) as refused:
        vdnn.advise(model, loader, optimizer, **{"hardware": "h100", "steps": 1, **options})
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    ("make", "batch", "sentence"),
    [
        (lambda n: nn.Linear(1, 1), 4, "(model, inputs, loss), or an object with `model` and `step()`"),
        (lambda n: (nn.Tanh(), torch.randn(n, 4)), 4, "expected one with parameters to train"),
        (lambda n: (perceptron(), torch.randn(n, WIDTH), lambda out: out), 4, "a tensor of one number"),
        (lambda n: None, 0, "batch: expected a number, 1 or more, got 0."),
    ],
)
def test_what_is_no_workload_is_refused(make: Any, batch: int, sentence: str) -> None:
    with pytest.raises((TypeError, ValueError)) as refused:
        examine(WorkloadTraining(make, batch, name="wrong"), load_profile("h100"))
    assert sentence in str(refused.value)


def test_a_batch_may_be_a_dict_or_a_tensor_and_a_model_may_bring_its_loss() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = perceptron(1)

        def forward(self, x: torch.Tensor) -> Any:
            return type("Output", (), {"loss": self.inner(x).square().mean()})

    model = Named()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in ({"x": PAIR[0]}, PAIR[0]):
        assert vdnn.advise(model, [batch], optimizer, steps=1, hardware="h100").batch == BATCH


def test_where_nothing_is_found_it_says_so_and_what_was_looked_at() -> None:
    profile = load_profile("titan-x")
    training = training_of(perceptron(1), [PAIR])
    training.take_sample(PAIR)
    training.samples = BATCH
    training.optimizer = torch.optim.SGD(training.model.parameters(), lr=0.1, fused=True)
    advices = examine(training, profile)
    assert len(advices) == 0
    assert "  no advice\n  examined without a finding: mixed precision" in str(advices)


def test_a_gain_says_what_it_is_and_nothing_where_none_is_known() -> None:
    quicker = Gain(Basis.PREDICTED, "two rehearsals", 4_000_000, 3_000_000, 2**30, 2**29)
    assert (
        str(quicker) == "1.00 ms of 4.00 ms a step, 25.0 %; 512.00 MiB of 1.00 GiB, 50.0 % (predicted: two rehearsals)"
    )
    slower = Gain(Basis.PREDICTED, "two rehearsals", 4_000_000, 4_000_500, 2**30, 2**30)
    assert str(slower) == "0.5 us of 4.00 ms a step, 0.01 % longer (predicted: two rehearsals)"
    assert not slower.is_one
    larger = Gain(Basis.PREDICTED, "two rehearsals", before_bytes=2**30, after_bytes=2**31)
    assert str(larger) == "takes 2.00 GiB, not 1.00 GiB (predicted: two rehearsals)"
    assert str(unknown("nobody knows")) == "cannot be predicted here: nobody knows"
    assert unknown("nobody knows").saved_ns == 0


def test_advices_go_by_what_they_gain() -> None:
    def advice(gain: Gain, *, fits: bool = False) -> Advice:
        return Advice(Kind.AMP, "seen.", "do", gain, fits)

    most = advice(Gain(Basis.PREDICTED, "", 10, 1))
    less = advice(Gain(Basis.MEASURED, "", 10, 9))
    smaller = advice(Gain(Basis.PREDICTED, "", before_bytes=10, after_bytes=1))
    opened = advice(unknown(""))
    fitting = advice(Gain(Basis.PREDICTED, "", 10, 20, 100, 10), fits=True)
    mixed = [opened, smaller, less, most, fitting]
    assert sorted(mixed, key=lambda one: one.rank) == [fitting, most, less, smaller, opened]
