"""A forked child inherits device objects but neither threads nor contexts: calls say so, and it exits cleanly."""

from __future__ import annotations

import gc
import os

import pytest

from tests.conftest import open_fake_device
from tests.device.device_memory import TO_HOST
from tests.fake_driver.control import FakeDriver
from vdnn import _C, errors


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_is_refused_and_harms_nothing(device: _C.Device) -> None:
    stream = device.create_stream("s")
    memory, host = device.allocate_device(4096), device.allocate_pinned(4096)
    pool = _C.PinnedPool(device, cap_bytes=1 << 20)
    queue = _C.TransferQueue(device, pool)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            for call in (
                lambda: device.record(stream),
                lambda: device.allocate_pinned(1),
                lambda: pool.allocate(1),
                queue.flush,
            ):
                with pytest.raises(errors.ClosedError, match="forked child"):
                    call()
            device.close()  # releases nothing in the child
            queue.close()
            pool.close()
            del queue, pool
            gc.collect()
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    device.copy_async(host, memory, 4096, TO_HOST, stream)  # the parent's device still works
    device.drain(stream)
    queue.close()
    pool.close()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_drops_a_device_that_was_closed_before(fake_driver: FakeDriver) -> None:
    """A DataLoader worker that collects garbage drops devices that its parent has closed but not yet dropped."""
    closed = [_C.SimDevice(), _C.OrderingChecker(_C.SimDevice()), open_fake_device(fake_driver)]
    for device in closed:
        device.create_stream("s")
        device.close()
    del device
    child = os.fork()
    if child == 0:
        status = 1
        try:
            closed.clear()
            gc.collect()
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
