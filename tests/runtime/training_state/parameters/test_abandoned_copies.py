"""A copy that was issued ahead and is not needed: its memory is not reused before the copy is over."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import vdnn
from vdnn.runtime.training_state.state_copies import StateCopies, StateCopy


def test_data_replaced_while_the_copy_is_under_way_leave_its_memory_until_it_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The program replaces the data of the second layer, and holds what it put there. The first layer issues the copy
    of the second one ahead, whose call then finds that the parameter stays on the device from now on."""
    abandoned: list[StateCopy] = []
    original = StateCopies.abandon
    monkeypatch.setattr(
        StateCopies, "abandon", lambda self, moving: (abandoned.append(moving), original(self, moving))[1]
    )
    torch.manual_seed(0)
    model, x = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))).requires_grad_(False), torch.randn(4, 8)
    put = torch.randn(8, 8)
    expected = [model(x).detach(), model[2](torch.nn.functional.linear(model[0](x), put, model[1].bias)).detach()]
    with vdnn.offload("keep", model=model, parameters="frozen", device="sim", min_bytes=0) as session, torch.no_grad():
        for _ in range(4):
            assert torch.equal(model(x), expected[0])
            session.step()
        model[1].weight.data = put
        abandoned.clear()
        assert torch.equal(model(x), expected[1])
    assert abandoned
