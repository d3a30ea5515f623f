"""The gauges of a GPU, computed from timed events of the fake driver and from made-up memory statistics."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.conftest import open_fake_device
from tests.fake_driver.control import FakeDriver
from vdnn import _C
from vdnn.runtime.machine.gauges import CudaGauges


class Statistics:
    """A stand-in for torch.cuda.memory_stats_as_nested_dict, with the figures that an allocator would report."""

    def __init__(self) -> None:
        self.current = self.total = self.peak = 0

    def allocate(self, nbytes: int) -> None:
        self.current += nbytes
        self.total += nbytes
        self.peak = max(self.peak, self.current)

    def free(self, nbytes: int) -> None:
        self.current -= nbytes

    def __call__(self, device: torch.device) -> dict[str, Any]:
        figures = {"current": self.current, "allocated": self.total, "freed": 0, "peak": self.peak}
        return {"requested_bytes": {"all": figures}}


@pytest.fixture
def statistics(monkeypatch: pytest.MonkeyPatch) -> Statistics:
    statistics = Statistics()
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", statistics)
    return statistics


@pytest.fixture
def device(fake_driver: FakeDriver) -> Iterator[_C.Device]:
    device = open_fake_device(fake_driver)
    yield device
    device.close()


@pytest.fixture
def gauges(statistics: Statistics, device: _C.Device) -> CudaGauges:
    statistics.allocate(100)
    return CudaGauges(torch.device("cuda", 0), device)


def test_a_peak_that_rose_is_known_exactly(gauges: CudaGauges, statistics: Statistics) -> None:
    statistics.allocate(50)
    statistics.free(50)
    statistics.allocate(20)
    assert gauges.take_peaks()[0] == 150
    assert gauges.allocated_bytes() == 120


def test_a_peak_below_an_older_one_is_bounded_by_what_was_allocated(gauges: CudaGauges, statistics: Statistics) -> None:
    statistics.allocate(1000)
    statistics.free(1000)
    assert gauges.take_peaks()[0] == 1100
    statistics.allocate(30)
    statistics.free(30)
    statistics.allocate(40)
    # The true peak is 100 + 40. The statistics do not show that the 30 were freed before: the bound is 100 + 30 + 40.
    assert gauges.take_peaks()[0] == 170
    statistics.allocate(960)
    statistics.free(960)
    statistics.allocate(500)
    assert gauges.take_peaks()[0] == 1100, "never more than the peak that did not rise"


def test_absent_bytes_count_where_everything_is_kept(gauges: CudaGauges, statistics: Statistics) -> None:
    gauges.absent_bytes = 7
    statistics.allocate(1)
    assert gauges.take_peaks() == (101, 108)


def test_the_users_statistics_are_never_reset(gauges: CudaGauges, monkeypatch: pytest.MonkeyPatch) -> None:
    def reset(*_: object) -> None:
        raise AssertionError("the user's peak was reset")

    for name in ("reset_peak_memory_stats", "reset_accumulated_memory_stats", "reset_max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, reset)
    gauges.take_peaks()


def test_marks_are_timed_events_of_a_stream(gauges: CudaGauges, device: _C.Device) -> None:
    stream = device.create_stream("compute")
    begin = gauges.mark(stream)
    event = device.record(stream, timing=True)
    end = gauges.mark(stream)
    assert 0 <= gauges.ns_until(begin, event) <= gauges.ns_between(begin, end)
