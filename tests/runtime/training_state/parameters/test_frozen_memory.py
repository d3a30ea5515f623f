"""Bytes and times on virtual machines: of the frozen parameters the device holds those of the modules that run."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import vdnn
from vdnn.bytesize import parse_bytes
from vdnn.runtime.machine.virtual_machine import VirtualMachine
from vdnn.runtime.training_state.state_room import StateRoom

WIDTH, DEPTH, BATCH, STEPS = 2048, 8, 256, 5
WEIGHT_BYTES = 4 * WIDTH * WIDTH
FROZEN_BYTES = DEPTH * WEIGHT_BYTES  # biases are below `min_bytes`
ACTIVATION_BYTES = 4 * BATCH * WIDTH
# The narrowest window: one weight arrives while another is used.
ONE_AHEAD = vdnn.Limits(offload_window="1MiB", reload_window="1MiB")


@pytest.fixture(autouse=True)
def _nothing_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters that stay where a budget has room are tested in test_state_room.py."""
    monkeypatch.setattr(StateRoom, "stepped", lambda *_: None)


class Backbone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(WIDTH))
        self.layers = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)]).requires_grad_(False)
        self.head = nn.Linear(WIDTH, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outcome: torch.Tensor = self.head(self.layers(x + self.shift))
        return outcome


def train(machine: VirtualMachine, budget: str | None, *, is_managed: bool = True) -> tuple[list[int], int, str]:
    """Returns the peak of each step, the bytes allocated between steps, and the report."""
    model = Backbone()
    optimizer = torch.optim.SGD([model.shift, *model.head.parameters()], lr=0.1)
    x = torch.randn(BATCH, WIDTH)
    peaks = []
    given = {"model": model, "parameters": "frozen"} if is_managed else {}
    with vdnn.offload(budget=budget, device=machine, limits=ONE_AHEAD, **given) as session:  # type: ignore[arg-type]
        for _ in range(STEPS):
            machine.reset_peak()
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            peaks.append(machine.peak_bytes)
        between = machine.allocated_bytes
    if is_managed:
        (transport,) = session._engine.transports.opened()
        assert transport.state_bytes == 0  # all is back
    assert machine.allocated_bytes - between == (FROZEN_BYTES if is_managed else 0)
    return peaks, between, session.report()


def test_between_steps_the_device_holds_no_frozen_weight() -> None:
    with VirtualMachine("rtx-4090") as machine:
        _, plain, _ = train(machine, None, is_managed=False)
    with VirtualMachine("rtx-4090") as machine:
        _, managed, _ = train(machine, None)
    assert managed == plain - FROZEN_BYTES


def test_a_step_holds_no_more_than_the_working_set_and_what_plain_torch_holds_beside_the_weights() -> None:
    with VirtualMachine("rtx-4090") as machine:
        plain, *_ = train(machine, None, is_managed=False)
    with VirtualMachine("rtx-4090") as machine:
        managed, _, report = train(machine, None)
    working_set_bytes = 2 * WEIGHT_BYTES  # the layer that runs, and the next one
    assert max(managed) <= max(plain) - FROZEN_BYTES + 1.05 * working_set_bytes
    assert "frozen parameters: 128.00 MiB on the host" in report


def test_a_budget_that_the_weights_exceed_is_met_without_them() -> None:
    with VirtualMachine("rtx-4090") as machine, pytest.raises(vdnn.BudgetError):
        train(machine, "64MiB", is_managed=False)
    with VirtualMachine("rtx-4090") as machine:
        peaks, *_ = train(machine, "64MiB")
    assert max(peaks) <= parse_bytes("64MiB")


def test_host_memory_is_pinned_once_for_each_byte() -> None:
    with VirtualMachine("rtx-4090") as machine:
        model = Backbone()
        with vdnn.offload("keep", device=machine, model=model, parameters="frozen") as session:
            model(torch.randn(BATCH, WIDTH)).sum().backward()
            assert FROZEN_BYTES <= session.host_bytes <= 1.05 * FROZEN_BYTES


def test_weights_are_fetched_ahead_of_their_use() -> None:
    with VirtualMachine("rtx-4090") as machine:
        *_, report = train(machine, None)
    # Each of forward and backward begins with one weight on demand; the first step knows no order.
    on_demand = DEPTH + DEPTH + 2 * (STEPS - 1)
    total = 2 * DEPTH * STEPS
    line = next(one for one in report.splitlines() if "frozen parameters" in one)
    ahead = int(line.split(" ahead")[0].split()[-1])
    assert f"{total} copies" in line
    assert ahead >= total - on_demand


def test_as_many_bytes_are_fetched_ahead_as_the_largest_weight_has() -> None:
    """A plan leaves room for one copy ahead, of the largest weight. Of others as many come as fit there."""
    waiting: list[int] = []
    with VirtualMachine("rtx-4090") as machine:
        model = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), Backbone())
        model[:2].requires_grad_(False)
        optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.1)
        with vdnn.offload(device=machine, model=model, parameters="frozen", limits=ONE_AHEAD) as session:
            assert session._engine.parameter_saves is not None
            (managed,) = session._engine.parameter_saves.managers()

            def look(*_: object) -> None:
                fetched = managed._streaming._fetched.values()
                waiting.append(sum(one.nbytes for one in fetched if not one.has_arrived))

            model[2].layers[0].register_forward_pre_hook(look)
            for _ in range(3):
                model(torch.randn(BATCH, WIDTH)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    assert waiting == [0, 4 * WEIGHT_BYTES, 4 * WEIGHT_BYTES]
