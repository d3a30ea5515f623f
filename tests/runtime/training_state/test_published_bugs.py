"""Bugs that others published of offloaded optimizer states, each with its number: the same symptom does not show here.

The name of a test ends with repository and number. The tests are ours; what each issue saw is in its docstring.
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
from tests.conftest import open_fake_device
from tests.fake_driver.control import FakeDriver
from tests.runtime.training_state.conftest import Manage, on_host, open_session
from tests.runtime.training_state.loops import OPTIMIZERS, Training, begin, same
from tests.runtime.training_state.test_lives import expected, one_step, outcome, state_bytes
from vdnn.runtime.machine.virtual_machine import VirtualMachine

ADAMW = OPTIMIZERS["adamw"]


# The training is right.


def test_the_parameters_that_are_stepped_are_those_that_get_gradients_accelerate_3770(manage: Manage) -> None:
    """Offloaded parameters were other objects than the optimizer's: nothing was trained, without an error."""
    training = begin(ADAMW)
    before = [(one, one.data_ptr(), one.detach().clone()) for one in training.model.parameters()]
    with manage(training.optimizer):
        one_step(training)
        listed = training.optimizer.param_groups[0]["params"]
        for (parameter, address, values), ours, theirs in zip(before, training.model.parameters(), listed, strict=True):
            assert parameter is ours is theirs
            assert parameter.data_ptr() == address
            assert not torch.equal(parameter, values)


@pytest.mark.filterwarnings("ignore:vdnn. none of:vdnn.VdnnWarning")
def test_a_full_fine_tune_takes_less_than_sixteen_bytes_a_parameter_unsloth_1158() -> None:
    """A full fine-tune of 8B was asked for on a card of 24 GB: 16 bytes a parameter do not fit."""
    width, depth = 2048, 8
    with VirtualMachine("rtx-4090") as machine:
        model = nn.Sequential(*[nn.Linear(width, width) for _ in range(depth)])
        optimizer = torch.optim.AdamW(model.parameters())
        with vdnn.offload(device=machine, model=model, optimizer=optimizer):
            for _ in range(4):
                machine.reset_peak()
                model(torch.randn(64, width)).square().mean().backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        # Parameters and gradients are 8 of the 16 bytes. The rest is windows of slices, which no size of model widens.
        weights_bytes = 4 * width * (width + 1) * depth
        peak_bytes = machine.peak_bytes
    assert peak_bytes < 2 * weights_bytes + 3 * (64 << 20) < 4 * weights_bytes


def test_accumulated_micro_batches_are_one_step_pytorch_124523(manage: Manage) -> None:
    """The optimizer stepped once for each micro-batch."""
    training = begin(ADAMW)
    with manage(training.optimizer):
        for _ in training.steps(5):
            for _ in range(4):
                training.loss().backward()
            training.optimizer.step()
        assert {float(state["step"]) for state in training.optimizer.state.values()} == {5.0}


# Memory of the host.


def pinned(session: Any) -> Any:
    return session._engine.transports.opened()[0].pool.stats


def test_the_state_never_needs_a_second_place_on_the_host_verl_6193(manage: Manage) -> None:
    """Each time the state left, new pinned memory was taken before the old was returned: twice the bytes, at the peak,
    and the pod was killed."""
    training = begin(ADAMW)
    with manage(training.optimizer, policy="keep") as session:
        one_step(training)
        for _ in range(5):
            one_step(training)
        assert pinned(session).live_peak_bytes == on_host(training.optimizer) == state_bytes(training)


def test_the_memory_of_a_tensor_is_the_same_after_each_step_prime_rl_3552(fake_driver: FakeDriver) -> None:
    """Every step allocated a pageable and a pinned buffer for every tensor of the state."""
    training = begin(ADAMW)
    device = open_fake_device(fake_driver)
    with open_session(device, training.optimizer) as session:
        for _ in range(2):
            one_step(training)
        addresses = _addresses(training)
        before, pinned_bytes = fake_driver.call_count, pinned(session).pinned_bytes
        for _ in range(5):
            one_step(training)
            assert _addresses(training) == addresses
        assert not [call for call in fake_driver.calls()[before:] if "HostRegister" in call or "MemHostAlloc" in call]
        assert pinned(session).pinned_bytes == pinned_bytes
    session.close()
    device.close()


def _addresses(training: Training) -> list[int]:
    states = training.optimizer.state.values()
    return [tensor.data_ptr() for state in states for tensor in state.values() if tensor.dim()]


def test_steps_and_micro_batches_make_neither_streams_nor_host_memory_prime_rl_3200(fake_driver: FakeDriver) -> None:
    """Each step made two streams, whose pools kept 2.3 GiB a step. More micro-batches pinned a second set of
    buffers."""
    training = begin(ADAMW)
    device = open_fake_device(fake_driver)
    with open_session(device, training.optimizer) as session:
        for _ in range(2):
            one_step(training)
        before, pinned_bytes = fake_driver.call_count, pinned(session).pinned_bytes
        for micro_batches in (1, 2, 4):
            for _ in range(micro_batches):
                training.loss().backward()
            training.optimizer.step()
            training.optimizer.zero_grad()
        assert not [call for call in fake_driver.calls()[before:] if "StreamCreate" in call]
        assert pinned(session).pinned_bytes == pinned_bytes
    session.close()
    device.close()


def test_a_host_without_room_for_the_state_trains_with_what_fits_deepspeed_3000(manage: Manage) -> None:
    """Buffers of the host were sized without regard to its memory: it ran out of memory before the first step."""
    training = begin(ADAMW)
    limits = vdnn.Limits(host_budget=4096, offload_window="2KiB", reload_window="2KiB")
    with manage(training.optimizer, limits=limits) as session:
        for _ in range(3):
            one_step(training)
        assert pinned(session).pinned_bytes <= 4096
        assert on_host(training.optimizer) < state_bytes(training)
    assert same(outcome(training), expected(3))


# Checkpoints.


@pytest.mark.filterwarnings("ignore:vdnn. none of:vdnn.VdnnWarning")
def test_resuming_takes_no_more_of_the_device_than_training_transformers_22123() -> None:
    """The state was loaded to the device as a whole, which a training from scratch never holds. NVIDIA/Megatron-LM#4638
    and PrimeIntellect-ai/prime-rl#2154 are the same symptom."""
    peaks = []
    for is_resumed in (False, True):
        with VirtualMachine("rtx-4090") as machine:
            model = nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(8)])
            optimizer = torch.optim.AdamW(model.parameters())
            with vdnn.offload(device=machine, optimizer=optimizer):
                _step_of(model, optimizer)
                saved = optimizer.state_dict()
                machine.reset_peak()
                if is_resumed:
                    optimizer.load_state_dict(saved)
                _step_of(model, optimizer)
            peaks.append(machine.peak_bytes)
    assert peaks[1] <= peaks[0]


def _step_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(16, 2048)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("what", ["state_dict", "load_state_dict", "zero_grad"])
def test_an_optimizer_without_state_is_not_given_any_verl_299(what: str, manage: Manage) -> None:
    """Offloading the state of an optimizer that had not stepped made one that was wrong."""
    calls: dict[str, Callable[[torch.optim.Optimizer], object]] = {
        "state_dict": lambda optimizer: optimizer.state_dict(),
        "load_state_dict": lambda optimizer: optimizer.load_state_dict(optimizer.state_dict()),
        "zero_grad": lambda optimizer: optimizer.zero_grad(),
    }
    training = begin(ADAMW)
    with manage(training.optimizer):
        calls[what](training.optimizer)
        assert not training.optimizer.state
        one_step(training)
    assert same(outcome(training), expected(1))


def test_a_parameter_without_elements_is_stepped_with_the_others_megatron_148(manage: Manage) -> None:
    """A trailing shard of no elements stayed in the optimizer of the device, and its step raised
    (ISEEKYAN/Megatron-LM#148)."""

    def trained(inside: Any) -> list[Any]:
        torch.manual_seed(5)
        full, empty = nn.Parameter(torch.randn(16, 16)), nn.Parameter(torch.empty(0, dtype=torch.bfloat16))
        optimizer = torch.optim.AdamW([full, empty])
        with inside(optimizer):
            for _ in range(3):
                optimizer.zero_grad()
                (full.square().mean() + empty.sum().float()).backward()
                optimizer.step()
            return [full.detach().clone(), copy.deepcopy(optimizer.state_dict())]

    assert same(trained(lambda _: contextlib.nullcontext()), trained(manage))
