"""Faults within a step: afterwards model and optimizer are as after the step, or as before it, or an error says what
to load.

Every driver call of a step is refused in turn, once. The session makes up for each: the step has the bits of plain
PyTorch, and what could not leave is still on the device.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.conftest import open_fake_device
from tests.fake_driver.control import FakeDriver
from tests.runtime.training_state.conftest import Manage, on_host, open_session
from tests.runtime.training_state.loops import OPTIMIZERS, Training, begin, same
from tests.runtime.training_state.test_lives import expected, one_step, outcome, state_bytes
from vdnn.errors import DeviceLostError, VdnnError
from vdnn.runtime.session.session import Session
from vdnn.runtime.training_state.host_tensor import HostTensor
from vdnn.runtime.training_state.state_copies import StateCopies, StateCopy

ADAMW = OPTIMIZERS["adamw"]
OUT_OF_MEMORY, INVALID_VALUE, ILLEGAL_ADDRESS = 2, 1, 700


@contextlib.contextmanager
def on_the_fake_driver(driver: FakeDriver, training: Training) -> Iterator[Session]:
    device = open_fake_device(driver)
    try:
        with contextlib.closing(open_session(device, training.optimizer)) as session, session:
            yield session
    finally:
        device.close()


def step_only(training: Training) -> None:
    training.optimizer.step()
    training.optimizer.zero_grad()


def test_without_room_for_two_slices_one_comes_after_the_other_has_left(
    manage: Manage, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = begin(ADAMW)
    refused: list[int] = []
    fetch = StateCopies.fetch

    def without_room_ahead(copies: StateCopies, hosts: list[HostTensor]) -> StateCopy:
        is_first = hosts[0].tensor is first
        if not is_first and id(hosts[0]) not in refused:
            refused.append(id(hosts[0]))
            raise torch.OutOfMemoryError("no room")
        return fetch(copies, hosts)

    with manage(training.optimizer):
        one_step(training)
        first = training.optimizer.state[next(training.model.parameters())]["exp_avg"]
        monkeypatch.setattr(StateCopies, "fetch", without_room_ahead)
        one_step(training)
        assert refused
        assert same(outcome(training), expected(2))


@pytest.mark.filterwarnings("ignore:vdnn. none of:vdnn.VdnnWarning")  # nor can an activation leave
def test_no_host_memory_at_all_leaves_the_state_on_the_device(fake_driver: FakeDriver) -> None:
    training = begin(ADAMW)
    fake_driver.set_host_capacity(1)
    with on_the_fake_driver(fake_driver, training) as session:
        for _ in range(3):
            one_step(training)
        assert on_host(training.optimizer) == 0
        assert "3.88 KiB of it stay on the device" in session.report()
        assert same(outcome(training), expected(3))
    fake_driver.set_host_capacity(1 << 40)


def test_a_lost_device_is_said_to_have_lost_the_step(fake_driver: FakeDriver) -> None:
    training = begin(ADAMW)
    with contextlib.suppress(DeviceLostError), on_the_fake_driver(fake_driver, training):
        one_step(training)
        training.loss().backward()
        fake_driver.fail_async(9, ILLEGAL_ADDRESS)
        with pytest.raises(VdnnError, match="the device is lost|load both from the last checkpoint"):
            step_only(training)
    fake_driver.reset()


class Interrupted(torch.optim.AdamW):
    """Receives SIGINT in each step of a slice, while `armed`."""

    armed = 0

    def step(self, closure: Any = None) -> Any:
        if Interrupted.armed:
            Interrupted.armed -= 1
            signal.raise_signal(signal.SIGINT)
        return super().step(closure)


@pytest.mark.usefixtures("interruptible")
def test_a_second_ctrl_c_is_served_at_once(manage: Manage) -> None:
    training = begin(lambda parameters: Interrupted(parameters, lr=1e-2, foreach=False))
    with manage(training.optimizer):
        one_step(training)
        training.loss().backward()
        Interrupted.armed = 2
        with pytest.raises(KeyboardInterrupt):
            training.optimizer.step()
        assert on_host(training.optimizer) == state_bytes(training)
