"""Bytes and times on virtual machines: without the state, plans fit where they did not, and every term is counted."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

import vdnn
from tests.runtime.training_state.conftest import on_host
from vdnn.bytesize import parse_bytes
from vdnn.runtime.machine.virtual_machine import VirtualMachine

WIDTH, DEPTH, BATCH = 2048, 8, 4096
WEIGHT_BYTES = 4 * WIDTH * WIDTH
WEIGHTS_BYTES = DEPTH * (WEIGHT_BYTES + 4 * WIDTH)
STATE_BYTES = 2 * DEPTH * WEIGHT_BYTES  # biases are below `min_bytes`
SMALL_STATE_BYTES = 2 * DEPTH * 4 * WIDTH + 4 * 2 * DEPTH  # of biases, and the counts of steps
INPUT_BYTES = 4 * BATCH * WIDTH


def layers() -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)])


def train(machine: VirtualMachine, budget: str | None, steps: int = 4, *, is_managed: bool = True) -> list[int]:
    """Returns the peak of each step, and the bytes allocated after the last."""
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(BATCH, WIDTH)
    peaks = []
    managed = optimizer if is_managed else None
    policy = "keep" if budget is None else "auto"  # with a plan the state stays where there is room
    with vdnn.offload(policy, budget=budget, device=machine, optimizer=managed) as session:
        for _ in range(steps):
            machine.reset_peak()
            model(x).relu().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            peaks.append(machine.peak_bytes)
    if is_managed:
        away_bytes = on_host(optimizer)
        assert away_bytes == STATE_BYTES or budget is not None
        assert session._engine.transports.opened()[0].state_bytes == away_bytes
    return [*peaks, machine.allocated_bytes]


@pytest.mark.parametrize("is_managed", [False, True])
def test_between_steps_the_device_holds_the_parameters_and_no_large_state(is_managed: bool) -> None:
    with VirtualMachine("rtx-4090") as machine:
        *_, between = train(machine, None, is_managed=is_managed)
    resident = WEIGHTS_BYTES + SMALL_STATE_BYTES + INPUT_BYTES
    assert between == resident + (0 if is_managed else STATE_BYTES)


@pytest.mark.parametrize("step", ["immediate", "deferred"])
def test_host_memory_is_pinned_once_for_each_byte(step: Any) -> None:
    with VirtualMachine("rtx-4090") as machine:
        model = layers()
        optimizer = torch.optim.AdamW(model.parameters())
        with vdnn.offload("keep", device=machine, optimizer=optimizer, optimizer_step=step) as session:
            for _ in range(3):
                model(torch.randn(16, WIDTH)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            assert STATE_BYTES <= session.host_bytes <= 1.05 * STATE_BYTES


def test_the_report_says_how_long_the_compute_waited_for_the_state() -> None:
    """Nearly the whole step is the way of the state over the link: a step's own traffic takes a tenth of that."""
    steps, taken_ns = 3, 0
    with VirtualMachine("rtx-4090") as machine:
        model = layers()
        optimizer = torch.optim.AdamW(model.parameters())
        with vdnn.offload("keep", device=machine, optimizer=optimizer) as session:
            for _ in range(steps):
                model(torch.randn(16, WIDTH)).square().mean().backward()
                begin_ns = machine.now_ns
                optimizer.step()
                taken_ns += machine.now_ns - begin_ns
                optimizer.zero_grad()
        found = re.search(r"for which compute waited ([\d.]+) ms", session.report())
    assert found is not None
    taken_ms = taken_ns / steps / 1e6
    assert 0.7 * taken_ms <= float(found[1]) <= taken_ms


def test_a_budget_that_the_state_exceeds_is_met_without_it() -> None:
    with VirtualMachine("rtx-4090") as machine, pytest.raises(vdnn.BudgetError):
        train(machine, "560MiB", is_managed=False)
    with VirtualMachine("rtx-4090") as machine:
        *peaks, _ = train(machine, "560MiB", 6)
    assert max(peaks) <= parse_bytes("560MiB")


def test_the_least_budget_falls_by_the_state_less_what_a_step_brings_in() -> None:
    """A window of 64 MiB each way is the state of two matrices of 16 MiB each."""
    least = []
    for is_managed in (False, True):
        with VirtualMachine("rtx-4090") as machine:
            *peaks, _ = train(machine, "min", 6, is_managed=is_managed)
            least.append(peaks[-1])
    assert least[0] - least[1] >= STATE_BYTES - 2 * (64 << 20)


def test_the_step_takes_the_time_of_the_link_and_is_hidden_as_far_as_it_goes() -> None:
    """Copies of both directions overlap, and with the step: it takes what the link needs, and in all one slice to come,
    one to be stepped and one to leave."""
    with VirtualMachine("rtx-4090") as machine:
        model = layers()
        optimizer = torch.optim.AdamW(model.parameters())
        with vdnn.offload(device=machine, optimizer=optimizer):
            took_ns = [_step_ns(machine, optimizer) for _ in range(2)]
        own_ns = _step_ns(machine, torch.optim.AdamW(model.parameters()))
        profile = machine.profile
    slices = DEPTH  # of one matrix each
    slice_ns = STATE_BYTES / slices / min(profile.to_host_bytes_per_s, profile.to_device_bytes_per_s) * 1e9
    both_ns = 2 * STATE_BYTES / profile.duplex_bytes_per_s * 1e9
    latencies_ns = 4 * DEPTH * profile.link_latency_ns
    assert took_ns[1] >= both_ns
    assert took_ns[1] <= both_ns + 2 * slice_ns + own_ns / slices + latencies_ns


def _step_ns(machine: VirtualMachine, optimizer: torch.optim.Optimizer) -> int:
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.empty_like(parameter)
    begin_ns = machine.now_ns
    optimizer.step()
    return machine.now_ns - begin_ns


def test_a_step_holds_no_more_than_its_windows_beside_parameters_and_gradients() -> None:
    with VirtualMachine("rtx-4090") as machine:
        model = layers()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
        limits = vdnn.Limits(offload_window="32MiB", reload_window="32MiB")
        with vdnn.offload(device=machine, optimizer=optimizer, limits=limits):
            for _ in range(3):
                for parameter in model.parameters():
                    parameter.grad = torch.empty_like(parameter)
                machine.reset_peak()
                optimizer.step()
                # The slice that is stepped, the next one, and the window of those that leave.
                state_bytes = 2 * WEIGHT_BYTES + (32 << 20)
                small_bytes = DEPTH * 4 * WIDTH
                assert machine.peak_bytes <= 2 * WEIGHTS_BYTES + state_bytes + small_bytes


def linear_layers(budget: int, steps: int) -> tuple[list[int], int, int]:
    """Trains eight equal layers with everything managed. Returns the peak of each step, the bytes on the device after
    the last one, and the bytes of the input."""
    with vdnn.VirtualMachine("rtx-4090") as machine:
        model = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(8)])
        x, optimizer, peaks = torch.ones(512, 256), torch.optim.AdamW(model.parameters()), []
        options: Any = {"device": machine, "model": model, "optimizer": optimizer, "parameters": "all"}
        with vdnn.offload(budget=budget, min_bytes="64KiB", **options) as session:
            for _ in range(steps):
                machine.reset_peak()
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                session.step()
                peaks.append(machine.peak_bytes)
            left_bytes = machine.tracker.live_bytes
    return peaks, left_bytes, x.nbytes


def test_slices_come_one_at_a_time_where_the_budget_has_no_room_for_two() -> None:
    """Weights, gradients and state of a layer are a quarter of the budget."""
    budget = int(4.1 * (1 << 20))
    peaks, _, _ = linear_layers(budget, 6)
    assert max(peaks) <= budget


def test_no_recompute_reads_a_parameter_that_is_on_the_host() -> None:
    """On a GPU it would be on another device than what it is multiplied with. A virtual machine would count it."""
    _, left_bytes, input_bytes = linear_layers(int(4.1 * (1 << 20)), 6)
    assert left_bytes <= input_bytes + (64 << 10)  # biases are smaller than what moves
