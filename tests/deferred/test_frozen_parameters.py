"""Frozen parameters on the accelerator: torch puts no tensor of the CPU in the place of one of an extension.

So they stay there, the report says why, and the training has its bits.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import vdnn
from tests.runtime.training_state.parameters.frozen_loops import made
from vdnn.testing.deferred import DeferredAccelerator, Mode

pytestmark = pytest.mark.usefixtures("little_garbage")


def losses(model: nn.Module, session: vdnn.Session | None) -> list[float]:
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.1)
    found = []
    for step in range(3):
        with session or torch.enable_grad():
            loss = model(torch.full((4, 16), 1.0 + step, device="deferred")).square().mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def test_frozen_parameters_stay_on_a_device_of_an_extension(mode: Mode) -> None:
    with DeferredAccelerator(mode, capacity="8MiB") as accelerator:
        expected = losses(made("low-rank").to("deferred"), None)
        model = made("low-rank").to("deferred")
        session = vdnn.offload("vdnn-all", device=accelerator, min_bytes=0, model=model, parameters="frozen")
        assert losses(model, session) == expected
        assert "torch cannot put a tensor of the CPU in the place of one of 'deferred'" in session.report()
        session.close()
        accelerator.synchronize()
        assert accelerator.violations == []
