"""Trainings with frozen parameters on the host have the bits of plain PyTorch, with every dropped copy poisoned."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import vdnn
from tests.runtime.training_state.parameters.frozen_loops import frozen_away, made, same, train
from vdnn import _C
from vdnn.runtime.training_state.parameters.streaming import Streaming

pytestmark = pytest.mark.usefixtures("poisoned")


def test_poison_is_seen(device: _C.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy that is dropped too early changes the losses."""
    use_saved = Streaming.use_saved

    def too_early(streaming: Streaming, away: Any, **options: bool) -> torch.Tensor:
        tensor = use_saved(streaming, away, **options).view(-1)
        tensor.fill_(float("nan"))
        return tensor

    expected = train(made("low-rank"), "plain", steps=2)
    monkeypatch.setattr(Streaming, "use_saved", too_early)
    assert not same(expected, train(made("low-rank"), "plain", lambda one: frozen_away(device, one), steps=2))


def test_low_rank_adapters_of_peft_have_the_bits_of_plain_torch(device: _C.Device) -> None:
    peft = pytest.importorskip("peft")

    def adapted() -> nn.Module:
        torch.manual_seed(5)
        base = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
        config = peft.LoraConfig(r=2, target_modules=["0", "2"], init_lora_weights=False)
        return peft.get_peft_model(base, config)

    found = train(adapted(), "plain", lambda one: frozen_away(device, one))
    assert same(train(adapted(), "plain"), found)


def test_a_functional_call_has_the_bits_of_plain_torch(device: _C.Device) -> None:
    model = made("low-rank")
    x = torch.randn(6, 16)
    given = {name: one.detach() * 2 for name, one in model.named_parameters() if not one.requires_grad}
    expected = torch.func.functional_call(model, given, (x,))
    with frozen_away(device, model):
        assert torch.equal(expected, torch.func.functional_call(model, given, (x,)))


def test_a_gradient_of_a_gradient_has_the_bits_of_plain_torch(device: _C.Device) -> None:
    def found(model: nn.Module) -> list[torch.Tensor]:
        x = torch.linspace(0, 1, 96).view(6, 16).requires_grad_()
        (first,) = torch.autograd.grad(model(x).tanh().sum(), x, create_graph=True)
        trained = [one for one in model.parameters() if one.requires_grad]
        return list(torch.autograd.grad(first.square().sum(), trained))

    model = made("low-rank")
    expected = found(model)
    with frozen_away(device, model):
        assert same(expected, found(model))


def test_a_graph_runs_backward_after_its_session(device: _C.Device) -> None:
    expected = made("low-rank")
    x = torch.randn(6, 16)
    expected(x).sum().backward()
    model = made("low-rank")
    with frozen_away(device, model):
        loss = model(x).sum()
        loss.backward(retain_graph=True)
        model.zero_grad()
    loss.backward()
    pairs = zip(expected.parameters(), model.parameters(), strict=True)
    assert all(torch.equal(a.grad, b.grad) for a, b in pairs if a.grad is not None and b.grad is not None)


def test_a_plan_with_recomputes_has_the_bits_of_plain_torch() -> None:
    def run(machine: vdnn.VirtualMachine, *, is_managed: bool) -> list[Any]:
        model = made("low-rank")
        chosen = {"model": model, "parameters": "frozen"} if is_managed else {}
        return train(
            model, "plain", lambda _: vdnn.offload(budget="min", device=machine, min_bytes=0, **chosen), steps=12
        )

    with vdnn.VirtualMachine("rtx-4090", fake=False) as machine:
        expected = run(machine, is_managed=False)
        assert same(expected, run(machine, is_managed=True))
