"""The measured timeline of a step: busy times, the stalls of the compute stream, and allocated bytes over time."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

import vdnn
from tests.runtime.rigs.virtual_training import MODELS, trained_virtually
from vdnn.hardware import HardwareProfile, load_profile
from vdnn.runtime.machine.gauges import Gauges, Peaks
from vdnn.runtime.machine.virtual_machine import VirtualMachine
from vdnn.runtime.steps.measurement import Meter
from vdnn.step.timeline import Copy, Timeline, Track


def measured(name: str, policy: str = "vdnn-all", **options: str) -> Timeline:
    timeline = trained_virtually(name, policy, **options).timeline
    assert timeline is not None
    return timeline


@pytest.mark.parametrize("name", MODELS)
def test_a_step_is_its_computing_and_its_stalls(name: str) -> None:
    session = trained_virtually(name)
    assert session.timeline is not None
    assert session.recording is not None
    assert session.timeline.step_ns == session.recording.compute_ns + session.timeline.stall_ns


@pytest.mark.parametrize("name", MODELS)
def test_with_everything_kept_nothing_moves_and_nothing_waits(name: str) -> None:
    session = trained_virtually(name, "keep")
    timeline = session.timeline
    assert timeline is not None
    assert session.recording is not None
    assert not timeline.copies
    assert timeline.stall_ns == 0
    assert timeline.peak_bytes == session.recording.peak_bytes
    assert [mark.peak_bytes for mark in timeline.marks] == [point.peak_bytes for point in session.recording.points]


@pytest.mark.parametrize("name", MODELS)
def test_one_engine_does_one_copy_at_a_time(name: str) -> None:
    timeline = measured(name, offload_window="1KiB", reload_window="4KiB")
    for track in Track:
        copies = [copy for copy in timeline.copies if copy.track is track]
        assert copies
        assert all(before.end_ns <= after.begin_ns for before, after in itertools.pairwise(copies))
        assert timeline.busy_ns(track) <= copies[-1].end_ns


def test_a_stall_is_as_long_as_the_link_makes_it() -> None:
    """A map of 40 MB on a link of 10 GB/s takes 4 ms and the latency. The one operation after its save hides a little
    of that."""
    profile = load_profile("titan-x")
    with VirtualMachine(profile) as machine:
        x = torch.randn(10_000_000, requires_grad=True)
        with vdnn.offload(
            "vdnn-all",
            device=machine,
            min_bytes=0,
            measure=True,
            warmup_steps=0,
            limits=vdnn.Limits(offload_window=1, reload_window=1),
        ) as session:
            y = x.tanh()
            z = y.tanh()
            del y
            z.sum().backward()
            session.step()
    timeline = session.timeline
    assert timeline is not None
    to_host = [copy for copy in timeline.copies if copy.track is Track.TO_HOST]
    one_way_ns = round(40e6 / profile.to_host_bytes_per_s * 1e9)
    assert all(abs(copy.end_ns - copy.begin_ns - one_way_ns - profile.link_latency_ns) <= 1 for copy in to_host)
    # The second map is saved one operation after the first: then the window is full, and the stream waits for the
    # first.
    (operation_ns,) = {mark.begin_ns for mark in timeline.marks[1:2]} - {0}
    hidden_ns = operation_ns - timeline.marks[0].end_ns
    expected = one_way_ns + profile.link_latency_ns - hidden_ns
    assert abs(timeline.marks[1].release_stall_ns - expected) <= 2
    assert timeline.reload_stall_ns > 0


def test_a_faster_link_means_shorter_stalls() -> None:
    def stall_ns(profile: HardwareProfile) -> int:
        with VirtualMachine(profile) as machine:
            x = torch.randn(1_000_000, requires_grad=True)
            with vdnn.offload(
                "vdnn-all",
                device=machine,
                min_bytes=0,
                measure=True,
                warmup_steps=0,
                limits=vdnn.Limits(offload_window=1),
            ) as session:
                x.tanh().tanh().tanh().sum().backward()
                session.step()
        assert session.timeline is not None
        return session.timeline.stall_ns

    assert stall_ns(load_profile("h100")) < stall_ns(load_profile("titan-x")) / 2


def test_peaks_are_what_the_machine_counted() -> None:
    with VirtualMachine("titan-x") as machine:
        model, inputs = MODELS["resnet"]()
        with vdnn.offload("vdnn-all", device=machine, min_bytes=0, measure=True, warmup_steps=0) as session:
            machine.reset_peak()
            model(*inputs).sum().backward()
            session.step()
            assert session.timeline is not None
            assert session.timeline.peak_bytes == machine.peak_bytes


def test_small_copies_go_one_by_one_while_they_are_measured() -> None:
    timeline = measured("perceptron")
    spans = [(copy.begin_ns, copy.end_ns) for copy in timeline.copies]
    assert len(set(spans)) == len(spans)


def test_it_survives_the_way_to_a_file_and_back(tmp_path: Path) -> None:
    timeline = measured("join")
    timeline.save(tmp_path / "timeline.json")
    assert Timeline.load(tmp_path / "timeline.json") == timeline


def test_bytes_and_busy_times_are_summed_by_track() -> None:
    out = Copy(Track.TO_HOST, 0, 10, 0, 5)
    back = Copy(Track.TO_DEVICE, 0, 10, 7, 9)
    timeline = Timeline("measured", "virtual", 12, (), (out, back, back))
    assert timeline.copied_bytes(Track.TO_HOST) == 10
    assert timeline.copied_bytes(Track.TO_DEVICE) == 20
    assert timeline.busy_ns(Track.TO_DEVICE) == 4


def test_the_report_tells_what_the_step_waited_for() -> None:
    report = trained_virtually("resnet", offload_window="1KiB", reload_window="1KiB").report()
    assert "step run in virtual time: " in report
    assert "ms for offloads and" in report


class MarksAreTimes(Gauges):
    """Gauges of a device whose marks and events are their times in nanoseconds."""

    clock = "device"

    def mark(self, stream: Any) -> int:
        raise NotImplementedError

    def fall_behind(self, stream: Any) -> bool:
        raise NotImplementedError

    def ns_between(self, begin: int, end: int) -> int:
        return end - begin

    def ns_until(self, begin: int, event: Any) -> int:
        return int(event) - begin

    def allocated_bytes(self) -> int:
        return 0

    def take_peaks(self) -> Peaks:
        return Peaks(0, 0, 0)

    def pause(self) -> None:
        raise NotImplementedError

    def resume(self) -> None:
        raise NotImplementedError


US = 1000


@pytest.mark.parametrize(
    ("to_host_us", "to_device_us", "stalls_us"),
    [
        ([], [], (0, 0)),
        ([90], [95], (0, 0)),  # both were over before the hook
        ([120], [], (20, 0)),
        ([120], [190], (20, 40)),
        ([], [160, 190, 400], (0, 40)),  # the last is not waited for
        ([220, 230], [], (30, 0)),
        ([120, 230], [150], (50, 0)),
        ([200], [200], (0, 50)),  # two waits end with the reload
    ],
)
def test_a_device_that_waits_for_the_host_does_not_stall(
    to_host_us: list[int], to_device_us: list[int], stalls_us: tuple[int, int]
) -> None:
    """A hook begins at 100 us, reloads from 150 to 200, and ends at 250, as the host issues its marks."""
    meter = Meter(MarksAreTimes(), 0, 0)
    for track, ends in ((Track.TO_HOST, to_host_us), (Track.TO_DEVICE, to_device_us)):
        for end in ends:
            span: Any = ((end - 50) * US, end * US)
            meter.copied(track, 0, 1, span)
    meter.hook(0, 100 * US, (150 * US, 200 * US), 250 * US, 0, 0)
    meter.finish(300 * US, 320 * US, 0)
    timeline = meter.timeline()
    assert (timeline.release_stall_ns, timeline.reload_stall_ns) == (stalls_us[0] * US, stalls_us[1] * US)
    assert [(mark.begin_ns, mark.end_ns) for mark in timeline.marks] == [(100 * US, 250 * US), (300 * US, 320 * US)]


def test_a_wait_that_ends_with_its_copy_is_all_stall_within_the_precision_of_events() -> None:
    meter = Meter(MarksAreTimes(), 0, 0)
    span: Any = (0, 200 * US + 400)  # the device's events are half a microsecond exact
    meter.copied(Track.TO_DEVICE, 0, 1, span)
    meter.hook(0, 100 * US, (150 * US, 200 * US), 250 * US, 0, 0)
    meter.finish(300 * US, 300 * US, 0)
    assert meter.timeline().reload_stall_ns == 50 * US
