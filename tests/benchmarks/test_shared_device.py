"""Streams and events of a device whose copies and steps on the CPU share the link and the host's memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.whole_state.shared_device import MachineEngine, SharedDevice, StreamPoint
from vdnn.errors import VdnnError
from vdnn.planning.costs import LinkCosts
from vdnn.planning.training.training import TrainingMachine

GB = 10**9
MACHINE = TrainingMachine("a machine", LinkCosts(10 * GB, 10 * GB, 16 * GB, 0), 1 << 40, 40 * GB, 20 * GB)


def test_copies_of_both_directions_share_the_link() -> None:
    device = SharedDevice(MACHINE)
    into, out = device.create_stream(), device.create_stream()
    device.copy(into, MachineEngine.TO_DEVICE, 8 * GB)
    device.copy(out, MachineEngine.TO_HOST, 16 * GB)
    arrived, left = device.record(into), device.record(out)
    device.run()
    # Both at 8 GB/s for one second, then the other alone at 10.
    assert device.time_ns(arrived) == pytest.approx(1e9)
    assert device.time_ns(left) == pytest.approx(1.8e9)
    assert device.moved_bytes[MachineEngine.TO_HOST] == 16 * GB


def test_a_step_on_the_cpu_slows_copies_where_the_memory_of_the_host_is_slow() -> None:
    device = SharedDevice(replace(MACHINE, host_bytes_per_s=20 * GB))
    into, cpu = device.create_stream(), device.create_stream()
    device.copy(into, MachineEngine.TO_DEVICE, 10 * GB)
    device.step_on_cpu(cpu, 20 * GB)
    arrived, stepped = device.record(into), device.record(cpu)
    device.run()
    # 10 and 20 GB/s are wanted and 20 are there: 6.67 and 13.33 until both have ended.
    assert device.time_ns(arrived) == pytest.approx(1.5e9)
    assert device.time_ns(stepped) == pytest.approx(1.5e9)


def test_a_stream_waits_for_the_event_and_an_engine_for_the_copy_before() -> None:
    device = SharedDevice(replace(MACHINE, link=LinkCosts(10 * GB, 10 * GB, 20 * GB, 5)))
    compute, first, second = (device.create_stream() for _ in range(3))
    device.compute(compute, 1_000)
    device.wait(first, device.record(compute))
    device.copy(first, MachineEngine.TO_DEVICE, 1_000)
    device.copy(second, MachineEngine.TO_DEVICE, 3_000)
    ends = device.record(first), device.record(second)
    device.wait(compute, ends[0])
    device.compute(compute, 7)
    done = device.record(compute)
    device.run()
    assert device.time_ns(ends[1]) == pytest.approx(305)  # at once, with its latency
    assert device.time_ns(ends[0]) == pytest.approx(1_105)
    assert device.time_ns(done) == pytest.approx(1_112)
    assert device.time_ns(StreamPoint(compute, 0)) == 0


def test_an_event_that_was_not_recorded_is_refused() -> None:
    device = SharedDevice(MACHINE)
    stream = device.create_stream()
    with pytest.raises(VdnnError, match="event: expected one that was recorded, got"):
        device.wait(stream, StreamPoint(stream, 1))
