"""The gauges of a GPU, computed from timed events of the fake driver and from made-up statistics of an allocator."""

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
    """A stand-in for torch.cuda.memory_stats_as_nested_dict, with the figures and the history of an allocator."""

    def __init__(self) -> None:
        self.current = self.total = self.peak = self.allocations = self.frees = 0
        self.events: list[dict[str, Any]] | None = None  # while a history is recorded
        self.histories = 0

    def allocate(self, nbytes: int) -> None:
        self.current += nbytes
        self.total += nbytes
        self.allocations += 1
        self.peak = max(self.peak, self.current)
        self._happened("segment_alloc", 1 << 21)
        self._happened("alloc", nbytes)

    def free(self, nbytes: int) -> None:
        self.current -= nbytes
        self.frees += 1
        self._happened("free_requested", nbytes)
        self._happened("free_completed", nbytes)

    def take_workspaces(self, *sizes: int) -> None:
        """Allocates one after the other, each freed before the next."""
        for nbytes in sizes:
            self.allocate(nbytes)
            self.free(nbytes)

    def __call__(self, device: torch.device) -> dict[str, Any]:
        figures = {"current": self.current, "allocated": self.total, "peak": self.peak}
        blocks = {"allocated": self.allocations, "freed": self.frees}
        return {"requested_bytes": {"all": figures}, "active": {"all": blocks}}

    def _happened(self, action: str, nbytes: int) -> None:
        if self.events is not None:
            self.events.append({"action": action, "size": nbytes})

    def record_history(self, enabled: str | None, **options: Any) -> None:
        assert enabled is None or options["context"] is None, "stack traces cost too much"
        self.events = None if enabled is None else []
        self.histories += enabled is not None

    def snapshot(self) -> dict[str, Any]:
        assert self.events is not None
        return {"device_traces": [self.events]}


@pytest.fixture
def statistics(monkeypatch: pytest.MonkeyPatch) -> Statistics:
    statistics = Statistics()
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", statistics)
    monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: statistics.events is not None, raising=False)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", statistics.record_history)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", statistics.snapshot)
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


def test_a_peak_without_a_free_or_without_an_allocation_is_known_exactly(
    gauges: CudaGauges, statistics: Statistics
) -> None:
    statistics.take_workspaces(1000)
    gauges.take_peaks()
    statistics.allocate(30)
    statistics.allocate(40)
    assert gauges.take_peaks()[0] == 170
    statistics.free(30)
    assert gauges.take_peaks()[0] == 170
    assert gauges.take_peaks()[0] == 140


def step(gauges: CudaGauges, statistics: Statistics) -> list[int]:
    """The peaks of a step of two intervals, by the gauges."""
    gauges.step_begins()
    statistics.take_workspaces(300, 200)
    statistics.allocate(10)
    peaks = [gauges.take_peaks()[0]]
    statistics.take_workspaces(400)
    statistics.free(10)
    statistics.take_workspaces(50)
    return [*peaks, gauges.step_ended()[0]]


def test_workspaces_that_are_freed_one_after_the_other_do_not_add_up(
    gauges: CudaGauges, statistics: Statistics
) -> None:
    """Both workspaces of a convolution's backward: the peak is that of the larger one, not of their sum."""
    statistics.take_workspaces(5000)
    gauges.take_peaks()
    assert step(gauges, statistics) == [100 + 300 + 200 + 10, 110 + 400 + 50], "bounds, while it learns"
    for _ in range(3):
        assert step(gauges, statistics) == [100 + 300, 110 + 400]
    assert (statistics.histories, statistics.events) == (1, None), "one step was enough"


def test_a_peak_that_rose_is_taken_before_what_was_learned(gauges: CudaGauges, statistics: Statistics) -> None:
    """The same two workspaces, which were freed one after the other when it learned, are there together now."""
    step(gauges, statistics)
    gauges.step_begins()
    statistics.allocate(300)
    statistics.allocate(200)
    statistics.free(300)
    statistics.free(200)
    statistics.allocate(10)
    assert gauges.step_ended()[0] == 100 + 300 + 200


def test_an_interval_of_another_sum_is_bounded_until_a_step_with_it_was_learned(
    gauges: CudaGauges, statistics: Statistics
) -> None:
    statistics.take_workspaces(5000)
    step(gauges, statistics)
    for expected in (100 + 300 + 150, 100 + 300 + 150, 100 + 300):
        gauges.step_begins()
        statistics.take_workspaces(300, 150)
        assert gauges.step_ended()[0] == expected
    assert statistics.histories == 2


def test_steps_that_always_differ_have_few_histories(gauges: CudaGauges, statistics: Statistics) -> None:
    statistics.take_workspaces(5000)
    for nbytes in range(20):
        gauges.step_begins()
        statistics.take_workspaces(300, 150 + nbytes)
        gauges.step_ended()
    assert statistics.histories == 4


def test_a_history_of_the_user_is_left_alone(gauges: CudaGauges, statistics: Statistics) -> None:
    statistics.take_workspaces(5000)
    gauges.take_peaks()
    statistics.record_history("all", context=None)
    for _ in range(2):
        assert step(gauges, statistics) == [610, 560]
    assert statistics.histories == 1
    assert statistics.events


@pytest.mark.parametrize("lost", [0, 1, -1])
def test_nothing_is_learned_from_a_history_that_does_not_agree_with_the_statistics(
    gauges: CudaGauges, statistics: Statistics, lost: int
) -> None:
    statistics.take_workspaces(5000)
    gauges.step_begins()
    statistics.take_workspaces(300, 200)
    assert statistics.events is not None
    statistics.events.pop(lost)  # the history is too short, or an event has another size
    statistics.events.insert(lost, {"action": "alloc", "size": 7})
    gauges.step_ended()
    assert statistics.events is None
    gauges.step_begins()
    statistics.take_workspaces(300, 200)
    assert gauges.step_ended()[0] == 600


def test_leaving_a_session_within_a_step_stops_its_history(gauges: CudaGauges, statistics: Statistics) -> None:
    gauges.step_begins()
    assert statistics.events is not None
    gauges.pause()
    assert statistics.events is None


def test_absent_bytes_count_where_everything_is_kept(gauges: CudaGauges, statistics: Statistics) -> None:
    gauges.absent_bytes = 7
    statistics.allocate(1)
    assert gauges.take_peaks() == (101, 108, 101)


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
