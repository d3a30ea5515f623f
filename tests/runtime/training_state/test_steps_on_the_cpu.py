"""Steps on the CPU by choice: forms that the device runs too give its bits (test_bits_by_way.py), and torch's fused
kernels differ by a bound. For one step from equal parameters, state and gradients it is 2 units in the last place of
parameter and update together, as docs/training-state.md states.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import vdnn
from tests.runtime.training_state.conftest import Manage, on_host
from tests.runtime.training_state.loops import OPTIMIZERS, begin, same
from tests.runtime.training_state.test_lives import expected, one_step, outcome, state_bytes
from vdnn.errors import VdnnError
from vdnn.runtime.training_state import cpu_steps
from vdnn.runtime.training_state.optimizer_state import state_of

ADAMW = OPTIMIZERS["adamw"]
Make = Callable[[Any], torch.optim.Optimizer]
FUSED = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-2, amsgrad=True, weight_decay=0.1),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=1e-2),
}


@pytest.fixture
def manage_on_cpu(manage: Manage) -> Manage:
    return lambda optimizer, **options: manage(optimizer, optimizer_on="cpu", **options)


# Bits, and the bound.


def one_update(make: Make, inside: Any, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """One step from a state and parameters of 20 plain steps. Gradients have magnitudes of 1e-6 to 1e3."""
    generator = torch.Generator().manual_seed(3)
    parameter = nn.Parameter(torch.randn(4096, generator=generator).to(dtype))
    optimizer = make([parameter])

    def draw() -> torch.Tensor:
        magnitude = 10.0 ** torch.randint(-6, 3, (4096,), generator=generator)
        return (torch.randn(4096, generator=generator) * magnitude).to(dtype)

    for _ in range(20):
        parameter.grad = draw()
        optimizer.step()
    before = parameter.detach().clone()
    parameter.grad = draw()
    with inside(optimizer):
        optimizer.step()
        return [before, parameter.detach().clone(), copy.deepcopy(optimizer.state_dict()["state"][0])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("optimizer", FUSED)
def test_a_fused_step_on_the_cpu_differs_by_less_than_its_bound(
    optimizer: str, dtype: torch.dtype, manage: Manage
) -> None:
    on_device = one_update(FUSED[optimizer], manage, dtype)
    on_cpu = one_update(FUSED[optimizer], lambda managed: manage(managed, optimizer_on="cpu"), dtype)
    before, there, _ = on_device
    assert torch.equal(before, on_cpu[0])
    difference = (there - on_cpu[1]).abs().double()
    size = there.abs().double() + (there - before).abs().double()
    assert bool((difference <= 2 * torch.finfo(dtype).eps * size).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("optimizer", FUSED)
def test_every_element_of_narrow_parameters_is_stepped(
    optimizer: str, dtype: torch.dtype, manage_on_cpu: Manage
) -> None:
    """torch's own fused SGD skips most of them on the CPU."""
    parameter = nn.Parameter(torch.ones(4099, dtype=dtype))
    stepped = FUSED[optimizer]([parameter])
    with manage_on_cpu(stepped):
        parameter.grad = torch.ones_like(parameter)
        stepped.step()
    assert bool((parameter < 1).all())


@pytest.mark.parametrize("optimizer", FUSED)
def test_torchs_fused_kernel_runs_the_step(
    optimizer: str, manage_on_cpu: Manage, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []
    for name in ("sgd", "adam", "adamw", "adagrad"):
        kernel = getattr(torch, f"_fused_{name}_")
        monkeypatch.setattr(torch, f"_fused_{name}_", lambda *a, _n=name, _k=kernel, **k: (ran.append(_n), _k(*a, **k)))
    training = begin(FUSED[optimizer])
    with manage_on_cpu(training.optimizer):
        one_step(training)
    assert set(ran) == {optimizer}


def test_a_fused_step_divides_gradients_by_the_scale_as_on_the_device(manage: Manage) -> None:
    def gradients(inside: Any) -> list[Any]:
        training = begin(OPTIMIZERS["adamw-fused"])
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
        with inside(training.optimizer):
            scaler.scale(training.loss()).backward()
            scaler.step(training.optimizer)
            return [one.grad for one in training.model.parameters()]

    plain = gradients(lambda _: contextlib.nullcontext())
    assert same(plain, gradients(lambda managed: manage(managed, optimizer_on="cpu")))


def test_gradients_are_divided_by_the_scale_where_no_fused_kernel_runs(manage: Manage) -> None:
    """The step of a fused SGD in half precision is not fused on the CPU. It is skipped where a gradient is infinite."""

    def trained(inside: Any, *, fused: bool) -> list[Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).bfloat16()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=fused)
        scaler, found = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=2), list[Any]()
        with inside(optimizer):
            for step in range(6):
                loss = model(torch.randn(4, 8, dtype=torch.bfloat16)).float().square().mean()
                scaler.scale(loss * (float("inf") if step == 3 else 1)).backward()
                scaler.step(optimizer)
                scaler.update()
                found += [loss.detach(), *(one.detach().clone() for one in model.parameters())]
                optimizer.zero_grad()
        return found

    expected = trained(lambda _: contextlib.nullcontext(), fused=False)
    assert same(expected, trained(lambda managed: manage(managed, optimizer_on="cpu"), fused=True))


# What crosses the link, and where the state is.


def test_only_gradients_and_parameters_cross_the_link(manage_on_cpu: Manage) -> None:
    training = begin(ADAMW)
    weights_bytes = sum(one.nbytes for one in training.model.parameters())
    with manage_on_cpu(training.optimizer):
        for _ in range(3):
            one_step(training)
        moved = state_of(training.optimizer).moved
        assert moved.to_host_bytes == 3 * 2 * weights_bytes
        assert moved.to_device_bytes == 3 * weights_bytes
        assert on_host(training.optimizer) == state_bytes(training)


def test_the_state_is_the_same_objects_and_the_host_has_one_copy(manage_on_cpu: Manage) -> None:
    training = begin(ADAMW)
    with manage_on_cpu(training.optimizer, policy="keep") as session:
        one_step(training)
        held = {id(one) for state in training.optimizer.state.values() for one in state.values()}
        for _ in range(3):
            one_step(training)
        assert held == {id(one) for state in training.optimizer.state.values() for one in state.values()}
        assert session._engine.transports.opened()[0].pool.stats.live_bytes == state_bytes(training)
        assert len(training.optimizer.state) == len(list(training.model.parameters()))


def test_sessions_on_the_cpu_and_on_the_device_take_turns(manage: Manage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_steps, "_FUSED_ON_THE_CPU", ())
    training = begin(ADAMW)
    for where in ("cpu", "device", "cpu"):
        with manage(training.optimizer, optimizer_on=where) as session:
            one_step(training)
            assert on_host(training.optimizer) == state_bytes(training)
            assert ("it steps on the CPU" in session.report()) == (where == "cpu")
        one_step(training)
    assert same(outcome(training), expected(6))


def test_parameters_and_gradients_that_are_views_are_stepped(
    manage_on_cpu: Manage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_steps, "_FUSED_ON_THE_CPU", ())

    def trained(inside: Any) -> list[Any]:
        torch.manual_seed(0)
        flat = torch.randn(64)
        one, two = nn.Parameter(flat[:32].view(4, 8)), nn.Parameter(torch.randn(8, 4).t())
        optimizer = torch.optim.AdamW([one, two], lr=0.1)
        with inside(optimizer):
            for _ in range(4):
                one.grad, two.grad = torch.randn(8, 4).t(), torch.randn(1, 8).expand(4, 8)
                optimizer.step()
            return [flat, two.detach().clone(), copy.deepcopy(optimizer.state_dict())]

    assert same(trained(lambda _: contextlib.nullcontext()), trained(manage_on_cpu))


def test_a_parameter_that_a_graph_saved_counts_as_modified(manage_on_cpu: Manage) -> None:
    training = begin(ADAMW)
    with manage_on_cpu(training.optimizer):
        one_step(training)
        training.loss().backward()
        late = training.loss()
        training.optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            late.backward()


# Faults.


@pytest.mark.parametrize("host_budget", [4096, 8192])
def test_without_host_memory_to_pin_torch_copies(
    host_budget: int, manage_on_cpu: Manage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_steps, "_FUSED_ON_THE_CPU", ())
    training = begin(ADAMW)
    limits = vdnn.Limits(host_budget=host_budget, offload_window="2KiB", reload_window="2KiB")
    with manage_on_cpu(training.optimizer, policy="keep", limits=limits):
        for _ in range(3):
            one_step(training)
    assert same(outcome(training), expected(3))


# Bad input.


def test_wrong_arguments() -> None:
    optimizer = begin(ADAMW).optimizer
    with pytest.raises(ValueError, match="optimizer_on: expected 'device' or 'cpu', got 'host'"):
        vdnn.offload("vdnn-all", device="sim", optimizer=optimizer, optimizer_on="host")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="optimizer_on: it says where the optimizer steps. Give optimizer= as well"):
        vdnn.offload("vdnn-all", device="sim", optimizer_on="cpu")
    with vdnn.VirtualMachine("titan-x") as machine, pytest.raises(ValueError, match="has no clock for the CPU"):
        vdnn.offload(device=machine, optimizer=optimizer, optimizer_on="cpu")


def test_parameters_that_share_memory_are_refused() -> None:
    one = nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([one, nn.Parameter(one.data)], lr=0.1)
    with pytest.raises(VdnnError, match="SGD cannot be stepped on the CPU: two of its parameters share memory"):
        vdnn.offload("vdnn-all", device="sim", optimizer=optimizer, optimizer_on="cpu")
