"""Failures of the environment: no host memory, a driver that refuses, a lost device, a forked child.

Gradients stay right, or an error says what failed.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from tests.conftest import open_fake_device
from tests.fake_driver.control import FakeDriver
from tests.runtime.conftest import OpenSession
from tests.runtime.rigs.networks import images, small_resnet
from tests.runtime.rigs.side_by_side import assert_nothing_alive, assert_same_as_plain, differences, outcome
from vdnn import _C
from vdnn.errors import ClosedError, DeviceLostError, DriverError
from vdnn.runtime.session.limits import Limits
from vdnn.runtime.session.offload import offload
from vdnn.runtime.session.session import Session
from vdnn.runtime.storage.counters import Kept

OUT_OF_MEMORY = 2
ILLEGAL_ADDRESS = 700


class Training:
    """One step of a small ResNet, and its result without a session."""

    def __init__(self) -> None:
        self.model: nn.Module = small_resnet()
        self.x = images()
        self.plain = outcome(self.step, [self.model])

    def step(self) -> torch.Tensor:
        loss: torch.Tensor = self.model(self.x).square().sum()
        loss.backward()
        return loss

    def is_right(self, session: Session) -> bool:
        with session:
            return not differences(self.plain, outcome(self.step, [self.model]))

    def refusal(self, session: Session) -> str:
        """The text of the step's error, because the error itself would keep the graph alive. Empty if the step was
        right."""
        try:
            right = self.is_right(session)
        except DriverError as error:
            return str(error)
        assert right, "neither an error nor the right gradients"
        return ""


@pytest.fixture
def training() -> Training:
    return Training()


@pytest.fixture
def fake_session(fake_driver: FakeDriver) -> Iterator[Session]:
    """A session over CudaDevice on the fake driver. Each copy goes to the driver on its own."""
    device = _C.OrderingChecker(open_fake_device(fake_driver))
    session = offload(device=device, min_bytes=0, limits=Limits(offload_window="2KiB", reload_window="6KiB"))
    yield session
    fake_driver.reset()
    gc.collect()
    session.close()
    device.close()


@pytest.mark.parametrize("budget", ["4KiB", "8KiB", "16KiB"])
def test_at_the_host_budget_storages_stay_on_the_device(
    open_session: OpenSession, training: Training, budget: str
) -> None:
    session = open_session(host_budget=budget)
    for _ in range(3):
        assert training.is_right(session)
        assert_nothing_alive(session)
    (transport,) = session._engine.transports.values()
    assert transport is not None
    assert session.counters.kept[Kept.HOST_FULL] > 0
    assert transport.pool.stats.pinned_peak_bytes <= transport.pool.stats.cap_bytes
    assert "no host memory" in session.report()


def test_a_step_over_the_fake_driver_is_the_same_as_plain(fake_session: Session, training: Training) -> None:
    assert_same_as_plain(fake_session, training.step, training.model)
    assert_nothing_alive(fake_session)


def test_copies_that_run_as_late_as_they_may_give_the_same(
    fake_driver: FakeDriver, fake_session: Session, training: Training
) -> None:
    fake_driver.hold_streams()
    assert_same_as_plain(fake_session, training.step, training.model)


def test_a_refused_copy_off_the_device_is_kept_and_counted(
    fake_driver: FakeDriver, fake_session: Session, training: Training
) -> None:
    counters = fake_session.counters
    assert training.is_right(fake_session)
    usual, again = counters.storages, 0
    for nth in range(1, 12):
        fake_driver.fail_call("cuMemcpyDtoHAsync", nth, OUT_OF_MEMORY)
        refused, moved = counters.kept[Kept.REFUSED], counters.storages
        assert training.is_right(fake_session), f"copy {nth} refused"
        assert fake_driver.faults_pending == 0
        # In a settled step Python issues the copy again, and the driver takes it.
        again += counters.storages - moved == usual
        assert counters.kept[Kept.REFUSED] > refused or counters.storages - moved == usual, f"copy {nth} refused"
        assert_nothing_alive(fake_session)
    assert 0 < again < 11


def test_a_refused_copy_ahead_is_asked_for_again_at_the_use(
    fake_driver: FakeDriver, fake_session: Session, training: Training
) -> None:
    assert training.is_right(fake_session)
    counters = fake_session.counters
    refused_on_demand = 0
    for nth in range(1, 8):
        fake_driver.fail_call("cuMemcpyHtoDAsync", nth, OUT_OF_MEMORY)
        refusal = training.refusal(fake_session)
        assert not refusal or "cuMemcpyHtoDAsync_v2 of " in refusal
        refused_on_demand += bool(refusal)
        assert fake_driver.faults_pending == 0
        training.model.zero_grad()
        assert training.is_right(fake_session), f"after copy {nth} was refused"
        assert_nothing_alive(fake_session)
    assert refused_on_demand < 4
    assert counters.prefetched_reloads


def test_pinned_memory_that_is_refused_keeps_storages_on_the_device(
    fake_driver: FakeDriver, fake_session: Session, training: Training
) -> None:
    fake_driver.set_host_capacity(4096)
    assert training.is_right(fake_session)
    assert fake_session.counters.storages == 0
    assert fake_session.counters.kept[Kept.REFUSED] > 0
    fake_driver.set_host_capacity(1 << 30)
    assert training.is_right(fake_session)
    assert fake_session.counters.storages > 0


def test_any_driver_call_may_be_refused_and_the_next_step_works(
    fake_driver: FakeDriver, fake_session: Session, training: Training
) -> None:
    assert training.is_right(fake_session)
    called = fake_driver.call_count
    assert training.is_right(fake_session)
    calls = fake_driver.call_count - called
    assert calls > 50
    survived = 0
    tried = range(1, calls + 1, calls // 24)
    for nth in tried:
        fake_driver.fail_nth(nth, OUT_OF_MEMORY)
        refusal = training.refusal(fake_session)
        survived += not refusal
        assert not refusal or "CUDA_ERROR_OUT_OF_MEMORY" in refusal
        fake_driver.reset()
        assert training.is_right(fake_session), f"after driver call {nth} was refused"
        assert_nothing_alive(fake_session)
    assert survived > len(tried) // 2


def test_a_lost_device_is_raised_at_the_next_hook_and_refuses_further_work(
    fake_driver: FakeDriver, training: Training
) -> None:
    device = open_fake_device(fake_driver)
    session = offload(device=device, min_bytes=0, limits=Limits(offload_window="2KiB", reload_window="6KiB"))
    assert training.is_right(session)
    fake_driver.fail_async(3, ILLEGAL_ADDRESS)
    with pytest.raises(DeviceLostError, match="the device is lost: CUDA_ERROR_ILLEGAL_ADDRESS"), session:
        training.step()
    for _ in range(2):
        with pytest.raises(DeviceLostError, match="the device is lost"), session:
            training.step()
    training.model.zero_grad()
    training.step()  # without a session the model still works
    with pytest.raises(DeviceLostError):
        session.close()
    gc.collect()
    session.close()
    with contextlib.suppress(DeviceLostError):
        device.close()
    assert device.closed


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_passes_through(session: Session, training: Training) -> None:
    with session:
        training.step()
        training.model.zero_grad()
        moved = session.counters.storages
        gc.collect()  # objects of earlier tests are not for the child to collect
        child = os.fork()
        if child == 0:
            status = 1
            try:
                training.step()
                same = session.counters.storages == moved and session.counters.kept[Kept.OTHER_DEVICE] > 0
                status = 0 if same else 2
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        training.step()
    assert session.counters.storages == 2 * moved


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_child_forked_amid_another_threads_hook_is_not_locked_out(session: Session, training: Training) -> None:
    with session:
        waiting = training.model(training.x).square().sum()
        in_hook, has_forked = threading.Event(), threading.Event()

        def hook() -> None:
            with session._engine.saves.lock:
                in_hook.set()
                assert has_forked.wait(60)

        thread = threading.Thread(target=hook)
        thread.start()
        assert in_hook.wait(60)
        gc.collect()  # objects of earlier tests are not for the child to collect
        child = os.fork()
        if child == 0:
            status = 1
            try:
                signal.alarm(60)  # ends a child that hangs
                training.step()
                with pytest.raises(ClosedError, match="forked child"):
                    waiting.backward()
                torch.optim.SGD(training.model.parameters(), lr=0.1).step()
                session.step()
                status = 0
            finally:
                os._exit(status)
        has_forked.set()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        thread.join()
        waiting.backward()
