"""Bytes and times on virtual machines: between steps no state is on the device, and its copies overlap with the
forward pass."""

from __future__ import annotations

import re

import pytest
import torch

import vdnn
from tests.runtime.training_state.test_device_memory import (
    BATCH,
    INPUT_BYTES,
    SMALL_STATE_BYTES,
    STATE_BYTES,
    WEIGHTS_BYTES,
    WIDTH,
    layers,
)
from vdnn.runtime.machine.virtual_machine import VirtualMachine
from vdnn.runtime.training_state.optimizer_state import state_of
from vdnn.runtime.training_state.state_room import StateRoom


def train(step: str, tokens: int, steps: int = 4) -> tuple[int, int, float]:
    """The peak and the time of the last step, the milliseconds that compute waited per step, and what is checked on
    the way."""
    with VirtualMachine("rtx-4090") as machine:
        model = layers()
        optimizer = torch.optim.AdamW(model.parameters())
        x = torch.randn(tokens, WIDTH)
        options = {"device": machine, "optimizer": optimizer, "optimizer_step": step}
        with vdnn.offload(**options) as session:  # type: ignore[arg-type]
            for number in range(steps):
                begin_ns = machine.now_ns
                machine.reset_peak()
                model(x).relu().square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                took_ns = machine.now_ns - begin_ns
                if number and step == "deferred":
                    resident = WEIGHTS_BYTES + INPUT_BYTES * tokens // BATCH + SMALL_STATE_BYTES
                    assert machine.allocated_bytes == resident + WEIGHTS_BYTES  # the gradients, until they are used
            assert state_of(optimizer).moved.host_bytes in (0, STATE_BYTES)
            peak_bytes, said = machine.peak_bytes, session.report()
    waited = re.search(r"compute waited ([0-9.]+) ms", said)
    assert waited is not None
    return peak_bytes, took_ns, float(waited.group(1))


def test_copies_of_the_state_hide_behind_the_next_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 16,384 tokens the forward takes longer than the copies of the state, all of which leaves."""
    monkeypatch.setattr(StateRoom, "stepped", lambda *_: None)
    peak_bytes, took_ns, waited_ms = train("immediate", 4 * BATCH)
    deferred_peak_bytes, deferred_ns, deferred_ms = train("deferred", 4 * BATCH)
    assert deferred_ms < waited_ms / 5
    assert took_ns - deferred_ns > 0.8e6 * waited_ms
    assert deferred_peak_bytes <= peak_bytes
