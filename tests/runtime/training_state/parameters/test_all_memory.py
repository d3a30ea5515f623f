"""Bytes on virtual machines: of all parameters the device holds those of the modules that run, and a slice in the step.

Every term is counted: layers of one size, whose biases are below `min_bytes` and stay.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import vdnn
from vdnn.runtime.machine.virtual_machine import VirtualMachine

WIDTH, DEPTH, BATCH, STEPS = 2048, 8, 256, 4
WEIGHT_BYTES = 4 * WIDTH * WIDTH
WEIGHTS_BYTES = DEPTH * WEIGHT_BYTES
STATE_BYTES = WEIGHTS_BYTES  # the momentum
# The narrowest window: one weight arrives while another is used.
ONE_AHEAD = vdnn.Limits(offload_window="1MiB", reload_window="1MiB")


def train(machine: VirtualMachine, parameters: Any) -> dict[str, int]:
    """The bytes between steps, and the most in a forward, a backward and a step: of the last of `STEPS`."""
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    x = torch.randn(BATCH, WIDTH)
    found = {}

    def note(name: str) -> None:
        found[name] = machine.peak_bytes
        machine.reset_peak()

    with vdnn.offload(
        "keep", device=machine, limits=ONE_AHEAD, model=model, optimizer=optimizer, parameters=parameters
    ) as session:
        for _ in range(STEPS):
            machine.reset_peak()
            loss = model(x).square().mean()
            note("forward")
            loss.backward()
            del loss
            note("backward")
            optimizer.step()
            note("step")
            optimizer.zero_grad()
            found["between"] = machine.allocated_bytes
        found["host"] = session.host_bytes
    return found


def test_between_steps_the_device_holds_no_weight() -> None:
    with VirtualMachine("rtx-4090") as machine:
        plain = train(machine, None)
    with VirtualMachine("rtx-4090") as machine:
        managed = train(machine, "all")
    assert managed["between"] == plain["between"] - WEIGHTS_BYTES


def test_a_step_holds_two_layers_in_forward_and_backward_and_two_slices_in_the_optimizer() -> None:
    with VirtualMachine("rtx-4090") as machine:
        plain = train(machine, None)
    with VirtualMachine("rtx-4090") as machine:
        managed = train(machine, "all")
    two_layers_bytes = 2 * WEIGHT_BYTES
    assert managed["forward"] <= plain["forward"] - WEIGHTS_BYTES + 1.05 * two_layers_bytes
    assert managed["backward"] <= plain["backward"] - WEIGHTS_BYTES + 1.05 * two_layers_bytes
    # A slice is a weight with its momentum: one to come, one that is stepped and one that leaves. Tensors without data
    # keep their gradients on the device, as in plain training.
    assert managed["step"] <= managed["between"] + WEIGHTS_BYTES + 1.05 * 3 * 2 * WEIGHT_BYTES


def test_host_memory_is_pinned_once_for_each_byte() -> None:
    with VirtualMachine("rtx-4090") as machine:
        managed = train(machine, "all")
    needed_bytes = WEIGHTS_BYTES + WEIGHTS_BYTES + STATE_BYTES  # parameters, gradients, state
    assert needed_bytes <= managed["host"] <= 1.05 * needed_bytes
