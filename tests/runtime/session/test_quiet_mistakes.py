"""Sessions that could never do what was asked say so, with the way out, instead of passing everything through."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

import vdnn
from tests.runtime.rigs.networks import perceptron
from vdnn.runtime.machine.virtual_machine import VirtualMachine


@pytest.mark.parametrize("options", [{"budget": "1GiB"}, {"budget": "min"}, {"device": "cuda"}], ids=str)
def test_a_model_on_the_cpu_under_a_budget_is_refused(options: dict[str, Any]) -> None:
    model = perceptron(64, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = [parameter.detach().clone() for parameter in model.parameters()]

    def train() -> None:
        with vdnn.offload(min_bytes=0, **options):
            model(torch.randn(8, 64)).sum().backward()
            optimizer.step()

    with pytest.raises(vdnn.VdnnError, match="the model trains on the CPU, where nothing can be offloaded"):
        train()
    assert all(map(torch.equal, before, model.parameters())), "it is refused before the optimizer writes"


def test_a_machine_that_was_not_entered_is_refused() -> None:
    for fake in (False, True):
        session = vdnn.offload(budget="1GiB", device=VirtualMachine("titan-x", fake=fake), min_bytes=0)
        with pytest.raises(vdnn.VdnnError, match="the VirtualMachine was not entered"), session:
            perceptron(64, 2)(torch.randn(8, 64)).sum().backward()


def test_tensors_with_data_in_a_machine_without_data_are_refused() -> None:
    weight, x = nn.Parameter(torch.randn(64, 64)), torch.randn(8, 64)
    refused = pytest.raises(vdnn.VdnnError, match="has none. Make the model and its inputs")
    machine = VirtualMachine("titan-x")
    with machine, vdnn.offload("vdnn-all", device=machine, min_bytes=0), unset_fake_temporarily(), refused:
        (x @ weight).tanh()
