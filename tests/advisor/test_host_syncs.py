"""Host syncs of a step: each is found once, with its line, and nothing else is reported."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.advisor.programs import BATCH, WIDTH, evidence_of, found, perceptron, training_of
from vdnn.advisor.advice import Basis, Kind
from vdnn.advisor.change import Change
from vdnn.advisor.evidence import NotSeen
from vdnn.advisor.host_syncs import HostSync

THIS = "tests/advisor/test_host_syncs.py"
Look = Callable[[torch.Tensor], object]

LOOKS: dict[str, Look] = {
    ".item()": lambda x: x.sum().item(),
    "float(tensor)": lambda x: float(x.sum()),
    "int(tensor)": lambda x: int(x.sum()),
    "bool(tensor)": lambda x: 1 if x.sum() > 0 else 0,
    ".cpu()": lambda x: x.cpu(),
    ".tolist()": lambda x: x.tolist(),
    ".numpy()": lambda x: x.numpy(),
    "printing a tensor": lambda x: repr(x),
    "formatting a tensor": lambda x: f"{x.sum():.3f}",
    "nonzero()": lambda x: x.nonzero(),
    "unique()": lambda x: x.unique(),
    "masked_select()": lambda x: x.masked_select(x > 0),
    "an index that is a mask": lambda x: x[x > 0],
    "equal()": lambda x: torch.equal(x, x),
}


class Looked(nn.Module):
    """A module that calls a given function on the input of its forward."""

    def __init__(self, look: Look) -> None:
        super().__init__()
        self.look, self.inner = look, perceptron(1)

    def forward(self, x: torch.Tensor) -> Any:
        self.look(x.detach())
        return self.inner(x)


@pytest.mark.parametrize("call", LOOKS)
def test_each_way_of_waiting_is_seen_once_a_step_at_its_line(call: str) -> None:
    look = LOOKS[call]
    evidence = evidence_of(training_of(Looked(look)), steps=2)
    line = inspect.getsourcelines(look)[1]
    assert evidence.real.syncs == (HostSync(f"{THIS}:{line}", call, 1),)


def test_a_place_is_said_with_what_to_write_instead_and_no_gain_is_made_up() -> None:
    (advice,) = found(Kind.HOST_SYNC, evidence_of(training_of(Looked(LOOKS[".item()"])), steps=1))
    assert f"{THIS}:" in advice.seen
    assert "once in each step" in advice.seen
    assert "loss.detach()" in advice.action
    assert advice.gain.basis is Basis.UNKNOWN
    assert advice.gain.saved_ns == 0


def test_synchronizing_is_seen_and_torchs_own_is_put_back() -> None:
    before = torch.cuda.synchronize
    evidence = evidence_of(training_of(Looked(lambda x: torch.cuda.synchronize())), steps=1)
    assert [sync.call for sync in evidence.real.syncs] == ["torch.cuda.synchronize()"]
    assert torch.cuda.synchronize is before
    assert found(Kind.HOST_SYNC, evidence)[0].action.startswith("leave it out")


def test_a_scaler_is_told_of_the_type_that_needs_none() -> None:
    scaler = torch.amp.GradScaler("cpu")

    def step(model: Any, optimizer: Any, batch: Any) -> None:
        scaler.scale(functional.cross_entropy(model(batch[0]), batch[1])).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    (advice,) = found(Kind.HOST_SYNC, evidence_of(training_of(perceptron(), step=step), steps=2))
    assert "GradScaler" in advice.seen
    assert advice.action.startswith("bfloat16")


def test_two_calls_on_one_line_count_twice() -> None:
    evidence = evidence_of(training_of(Looked(lambda x: (x.sum().item(), x.mean().item()))), steps=2)
    assert [sync.count for sync in evidence.real.syncs] == [2]
    assert "2 times" in found(Kind.HOST_SYNC, evidence)[0].seen


def test_a_step_that_only_computes_is_not_advised() -> None:
    model = perceptron()
    adam = torch.optim.Adam(model.parameters(), foreach=False)  # it reads its own step counts on the host
    evidence = evidence_of(training_of(model, optimizer=adam), steps=2)
    assert found(Kind.HOST_SYNC, evidence) == []
    assert evidence.base.syncs == ()


def test_a_copy_to_the_device_of_the_model_is_no_wait() -> None:
    """Torch's gradient clipping makes such a copy, and so does `.to(device)` in a program that runs on the CPU."""

    def step(model: Any, optimizer: Any, batch: Any) -> None:
        functional.cross_entropy(model(batch[0].to("cpu")), batch[1].to("cpu")).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    assert evidence_of(training_of(perceptron(), step=step), steps=1).real.syncs == ()


def test_an_index_of_numbers_waits_for_nothing() -> None:
    evidence = evidence_of(training_of(Looked(lambda x: x[torch.tensor([0, 1])])), steps=1)
    assert found(Kind.HOST_SYNC, evidence) == []


def test_copies_of_what_is_on_the_host_are_seen_from_the_step_given() -> None:
    def step(model: Any, optimizer: Any, batch: Any) -> None:
        loss = functional.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()  # the line

    evidence = evidence_of(training_of(perceptron(), step=step), steps=1)
    lines, first = inspect.getsourcelines(step)
    line = first + next(number for number, text in enumerate(lines) if "the line" in text)
    assert evidence.real.syncs == (HostSync(f"{THIS}:{line}", ".item()", 1),)


class Branching(nn.Module):
    """A model that computes twice as much if a condition on the input holds."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 10)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.first(x)
        if x.detach().square().sum() >= 0:  # this always happens
            x = self.first(x)
        return self.last(x)


def test_a_rehearsal_goes_the_way_the_real_step_went() -> None:
    """Without data a branch has no answer. The rehearsal takes the real step's answer; without a real step it takes
    no."""
    seen = evidence_of(training_of(Branching()), steps=1)
    blind = evidence_of(training_of(Branching()), steps=0)
    products = dict(seen.base.products)["float32"] - dict(blind.base.products)["float32"]
    assert products == 3, "the first layer's forward, and the gradients of its input and its weight"
    assert [sync.call for sync in blind.base.syncs] == ["bool(tensor)"]
    assert found(Kind.HOST_SYNC, blind)[0].kind is Kind.HOST_SYNC, "seen in the rehearsal as well"


class Chosen(nn.Module):
    """Half of the batch goes through a layer, as in a mixture of experts."""

    def __init__(self, choose: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.choose, self.expert = choose, nn.Linear(WIDTH, 10)

    def forward(self, x: torch.Tensor) -> Any:
        chosen = torch.arange(len(x)) % 2 == 0
        return self.expert(x)[:1] + self.expert(self.choose(x, chosen)).sum(0)


CHOICES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "a mask": lambda x, chosen: x[chosen],
    "numbers of a mask": lambda x, chosen: x[chosen.nonzero()[:, 0]],
    "selected": lambda x, chosen: x.masked_select(chosen[:, None]).unflatten(0, (-1, WIDTH)),
}


@pytest.mark.parametrize("how", CHOICES)
def test_a_size_that_depends_on_data_is_rehearsed_as_the_real_step_had_it(how: str) -> None:
    batches = [(torch.randn(BATCH, WIDTH), torch.randint(10, (1,)))]
    by_data = evidence_of(training_of(Chosen(CHOICES[how]), batches), steps=1)
    half = evidence_of(training_of(Chosen(lambda x, chosen: x[: BATCH // 2].clone()), batches), steps=1)
    assert by_data.base.products == half.base.products
    again = by_data.step(Change(batch=2 * BATCH), "twice the batch")
    assert again.peak_bytes - by_data.base.peak_bytes >= BATCH // 2 * WIDTH * 4, "half of what is more is chosen too"


def test_a_step_that_needs_data_is_not_rehearsed_and_that_is_said() -> None:
    evidence = evidence_of(training_of(Looked(lambda x: x.unique(dim=0))), steps=1)
    with pytest.raises(NotSeen, match="the step cannot be rehearsed without data"):
        found(Kind.AMP, evidence)
    with pytest.raises(NotSeen, match="cannot be rehearsed"):
        evidence.step(Change(fused=True), "again")
    assert len(found(Kind.HOST_SYNC, evidence)) == 1
