"""Faults within a step: afterwards model and optimizer are as after the step, or as before it, or an error says what
to load.

Every driver call of a step is refused in turn, once. The session makes up for each: the step has the bits of plain
PyTorch, and what could not leave is still on the device.
"""

from __future__ import annotations

import contextlib
import copy
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.conftest import open_fake_device
from tests.fake_driver.control import FakeDriver
from tests.runtime.training_state.conftest import Manage, on_host, open_session, reach_fault
from tests.runtime.training_state.loops import OPTIMIZERS, Training, begin, same
from tests.runtime.training_state.test_lives import expected, one_step, outcome, state_bytes
from vdnn.errors import DeviceLostError, VdnnError
from vdnn.runtime.session.session import Session
from vdnn.runtime.training_state.host_tensor import HostTensor
from vdnn.runtime.training_state.state_copies import Moving, StateCopies

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


def calls_of_a_step(driver: FakeDriver) -> list[str]:
    """The driver calls of the second step, from first to last."""
    training = begin(ADAMW)
    with on_the_fake_driver(driver, training):
        one_step(training)
        training.loss().backward()
        before = driver.call_count
        step_only(training)
        return driver.calls()[before:]


@pytest.mark.slow
@pytest.mark.drawn(of=4)
@pytest.mark.parametrize("part", range(4))
def test_each_call_of_a_step_refused_in_turn_changes_no_bit(part: int, fake_driver: FakeDriver) -> None:
    calls = calls_of_a_step(fake_driver)
    wanted = expected(3)
    assert sum("Memcpy" in call for call in calls) == 40  # 10 parameters, 2 tensors each, both ways
    for nth in range(1 + part, len(calls) + 1, 4):
        training = begin(ADAMW)
        with on_the_fake_driver(fake_driver, training):
            one_step(training)
            training.loss().backward()
            fake_driver.fail_nth(nth, INVALID_VALUE)
            step_only(training)
            reach_fault(fake_driver, nth, calls)
            one_step(training)
            assert same(outcome(training), wanted), (nth, calls[nth - 1])
        assert same(outcome(training), wanted), (nth, calls[nth - 1])


def test_each_host_allocation_refused_in_turn_leaves_its_state_on_the_device(fake_driver: FakeDriver) -> None:
    wanted = expected(2)
    refused = 0
    for nth in range(1, 100):
        training = begin(ADAMW)
        with on_the_fake_driver(fake_driver, training) as session:
            fake_driver.fail_call("cuMemHostRegister", nth, OUT_OF_MEMORY)
            one_step(training)
            one_step(training)
            pending = fake_driver.faults_pending
            assert same(outcome(training), wanted), nth
            assert on_host(training.optimizer) <= state_bytes(training)
            assert session.report()
        fake_driver.reset()
        if pending:
            break
        refused += 1
    assert refused >= 1


def test_without_room_for_two_slices_one_comes_after_the_other_has_left(
    manage: Manage, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = begin(ADAMW)
    refused: list[int] = []
    fetch = StateCopies.fetch

    def without_room_ahead(copies: StateCopies, hosts: list[HostTensor]) -> Moving:
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


class Failing(torch.optim.AdamW):
    """Raises in the slice that has one parameter."""

    victim: torch.Tensor | None = None
    error: BaseException | None = None

    def step(self, closure: Any = None) -> Any:
        if any(one is Failing.victim for group in self.param_groups for one in group["params"]):
            assert Failing.error is not None
            raise Failing.error
        return super().step(closure)


@pytest.fixture
def failing() -> Iterator[Training]:
    yield begin(lambda parameters: Failing(parameters, lr=1e-2, foreach=False))
    Failing.victim = None


def test_an_exception_in_a_later_slice_names_what_to_load(failing: Training, manage: Manage) -> None:
    with manage(failing.optimizer):
        one_step(failing)
        failing.loss().backward()
        Failing.victim, Failing.error = failing.model.last.weight, ArithmeticError("no")  # type: ignore[assignment]
        said = r"the step of Failing stopped after \d of 10 parameters: no. Model and optimizer are between two steps"
        with pytest.raises(VdnnError, match=said) as raised:
            failing.optimizer.step()
        assert isinstance(raised.value.__cause__, ArithmeticError)
        assert [len(group["params"]) for group in failing.optimizer.param_groups] == [10]
        assert on_host(failing.optimizer) == state_bytes(failing)


def test_after_it_a_loaded_checkpoint_goes_on(failing: Training, manage: Manage) -> None:
    with manage(failing.optimizer):
        one_step(failing)
        failing.loss().backward()
        Failing.victim, Failing.error = failing.model.last.weight, ArithmeticError("no")  # type: ignore[assignment]
        with pytest.raises(VdnnError, match="load both"):
            failing.optimizer.step()
        Failing.victim = None
        good = begin(ADAMW)
        one_step(good)
        failing.model.load_state_dict(good.model.state_dict())
        failing.optimizer.load_state_dict(copy.deepcopy(good.optimizer.state_dict()))
        failing.optimizer.zero_grad()
        good.batches = begin(ADAMW).batches
        failing.batches = begin(ADAMW).batches
        for _ in range(3):
            one_step(good)
            one_step(failing)
        parameters = zip(good.model.parameters(), failing.model.parameters(), strict=True)
        assert all(torch.equal(one, other) for one, other in parameters)


def test_an_exception_in_a_closure_is_the_programs_own_and_changes_nothing(manage: Manage) -> None:
    training = begin(ADAMW)
    with manage(training.optimizer):
        one_step(training)
        before = outcome(training)
        with pytest.raises(ArithmeticError):
            training.optimizer.step(lambda: 1 / 0)
        assert same(before, outcome(training))
        one_step(training)
        assert same(outcome(training), expected(2))


class Interrupted(torch.optim.AdamW):
    """Receives SIGINT in each step of a slice, while `armed`."""

    armed = 0

    def step(self, closure: Any = None) -> Any:
        if Interrupted.armed:
            Interrupted.armed -= 1
            signal.raise_signal(signal.SIGINT)
        return super().step(closure)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, also in a process that was started to ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_in_the_middle_of_a_step_waits_for_its_end(manage: Manage) -> None:
    training = begin(lambda parameters: Interrupted(parameters, lr=1e-2, foreach=False))
    handler = signal.getsignal(signal.SIGINT)
    with manage(training.optimizer):
        one_step(training)
        training.loss().backward()
        Interrupted.armed = 1
        with pytest.raises(KeyboardInterrupt):
            training.optimizer.step()
        training.optimizer.zero_grad()
        assert signal.getsignal(signal.SIGINT) is handler
        assert same(outcome(training), expected(2))
        one_step(training)
        assert same(outcome(training), expected(3))


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
