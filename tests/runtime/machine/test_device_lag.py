"""A GPU stays behind the host while times are recorded: it waits where it would wait for the host, and nowhere else."""

from __future__ import annotations

import contextlib
import time

import pytest
import torch

from vdnn import _C
from vdnn.runtime.machine import device_lag
from vdnn.runtime.machine.device_lag import DeviceLag


@pytest.fixture
def spun(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The cycles of each wait, of a GPU with one cycle in a nanosecond."""
    cycles: list[int] = []
    monkeypatch.setattr(device_lag, "_spin", cycles.append)
    monkeypatch.setattr(DeviceLag, "_clock", lambda self: 1.0)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    return cycles


def test_a_device_that_has_caught_up_waits_for_longer_than_the_host_took(spun: list[int]) -> None:
    device = _C.SimDevice()  # has always run what was issued
    lag, stream = DeviceLag(torch.device("cuda", 0), device), device.create_stream("compute")
    lag.extend(stream)
    for _ in range(4):
        begin_ns = time.perf_counter_ns()
        time.sleep(0.002)
        lag.extend(stream)
        assert spun[-1] >= 2e6, (spun, time.perf_counter_ns() - begin_ns)
    assert len(spun) == 5
    assert max(spun) <= 20e6, "no wait is long, whatever the host did"
    device.close()


class Busy(_C.SimDevice):
    """A device that has reached no record while it is busy."""

    is_busy = True

    def query(self, event: _C.Event) -> bool:
        return not self.is_busy


def test_a_device_that_is_far_behind_does_not_wait(spun: list[int]) -> None:
    device = Busy()
    lag, stream = DeviceLag(torch.device("cuda", 0), device), device.create_stream("compute")
    for _ in range(5):
        lag.extend(stream)
    assert len(spun) == 2, "two hooks behind is enough"
    device.is_busy = False
    lag.extend(stream)
    assert len(spun) == 3, "it has caught up"
    device.close()


def test_without_cuda_nothing_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_lag, "_spin", None)
    device = _C.SimDevice()
    DeviceLag(torch.device("cuda", 0), device).extend(device.create_stream("compute"))
    device.close()
