"""A GPU stays behind the host while times are recorded: it waits where it would wait for the host, and nowhere else."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from vdnn import _C
from vdnn.runtime.machine import gauges as gauges_module
from vdnn.runtime.machine.gauges import CudaGauges, DeviceLag, Reading


@pytest.fixture
def spun(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The cycles of each wait, of a GPU with one cycle in a nanosecond."""
    cycles: list[int] = []
    monkeypatch.setattr(gauges_module, "_spin", cycles.append)
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
    monkeypatch.setattr(gauges_module, "_spin", None)
    device = _C.SimDevice()
    DeviceLag(torch.device("cuda", 0), device).extend(device.create_stream("compute"))
    device.close()


class _OneAfterAnother(_C.SimDevice):
    """A device on a clock of its own. The host issues to it, and waits for it."""

    host_ns = 0
    device_ns = 0
    spun_ns = 0

    def issue(self, host_ns: int, device_ns: int = 0) -> None:
        self.host_ns += host_ns
        self.device_ns = max(self.device_ns, self.host_ns) + device_ns

    def spin(self, cycles: int) -> None:
        self.spun_ns += cycles
        self.issue(5_000, cycles)

    def wait(self) -> None:
        self.host_ns = max(self.host_ns, self.device_ns)

    def record(self, stream: _C.Stream, timing: bool = False) -> Any:
        self.host_ns += 2_000
        return max(self.device_ns, self.host_ns)

    def query(self, event: Any) -> bool:
        self.host_ns += 1_000
        return int(event) <= self.host_ns

    def elapsed_ns(self, begin: Any, end: Any) -> int:
        self.wait()
        return int(end) - int(begin)


@pytest.fixture
def gauges(monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaGauges]:
    """Gauges of such a device."""
    device = _OneAfterAnother()
    monkeypatch.setattr(gauges_module, "_spin", device.spin)
    monkeypatch.setattr(gauges_module.time, "perf_counter_ns", lambda: device.host_ns)
    monkeypatch.setattr(DeviceLag, "_clock", lambda self: 1.0)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(CudaGauges, "_read", lambda self: Reading(0, 0, 0, 0, 0))
    yield CudaGauges(torch.device("cuda", 0), device)
    device.close()


def test_a_trial_that_waits_for_the_device_does_not_make_the_next_one_wait_longer(gauges: CudaGauges) -> None:
    """GPT-2's first step runs 307 trials. Each of these is measured and compared, and so waits for the device twice:
    for the lags behind the hook and behind its own begin, each twice as long as the host took."""
    device: Any = gauges._device
    stream = device.create_stream("compute")
    taken_ns = []
    for _ in range(307):
        device.issue(300_000, 60_000)  # a hook, and the operation behind it
        gauges.fall_behind(stream)
        begin_ns = device.host_ns
        device.issue(90_000)
        gauges.fall_behind(stream)
        begin = gauges.mark(stream)
        device.issue(100_000, 30_000)
        end = gauges.mark(stream)
        with gauges.host_waits():
            gauges.ns_between(begin, end)
        with gauges.host_waits():
            device.issue(50_000, 20_000)
            device.wait()
        taken_ns.append(device.host_ns - begin_ns)
    assert sum(taken_ns) <= 0.5e9, (max(taken_ns), taken_ns[-1])
    assert taken_ns[-1] < 1.5 * taken_ns[10], "what a trial takes does not grow"
