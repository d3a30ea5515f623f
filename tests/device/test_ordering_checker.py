"""The checker finds planted faults, names both sides, and reports nothing where streams and events order everything.

Offloaders have had each of these faults; each has a corrected twin that runs clean. None depends on timing: the checker
also finds a missing edge in a run in which the accesses happened in the right order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.conftest import SCHEDULE_IDS, SCHEDULES
from tests.device.device_memory import TO_DEVICE, TO_HOST
from vdnn import _C, errors

SIZE = 4096
READ, WRITE, RELEASE = _C.Access.READ, _C.Access.WRITE, _C.Access.RELEASE


class Rig:
    """A checked device with a compute stream, two copy streams, and memory on both sides."""

    def __init__(self, schedule: _C.Schedule) -> None:
        self.device = _C.OrderingChecker(_C.SimDevice(schedule=schedule, seed=5))
        self.compute = self.device.adopt_stream(0)
        self.out, self.back = self.device.create_stream("out"), self.device.create_stream("back")
        self.memory = self.device.allocate_device(SIZE)
        self.host = self.device.allocate_pinned(SIZE)

    def produce(self) -> None:
        self.device.note_access(self.memory, SIZE, WRITE, self.compute, "relu forward")

    def offload(self) -> _C.Event:
        self.device.wait(self.out, self.device.record(self.compute))
        self.device.copy_async(self.host, self.memory, SIZE, TO_HOST, self.out)
        return self.device.record(self.out)

    def release(self) -> None:
        self.device.note_access(self.memory, SIZE, RELEASE, self.compute, "storage dropped")

    def reload(self, target: int, copied: _C.Event | None) -> _C.Event:
        self.device.wait(self.back, self.device.record(self.compute))
        if copied is not None:
            self.device.wait(self.back, copied)
        self.device.copy_async(target, self.host, SIZE, TO_DEVICE, self.back)
        return self.device.record(self.back)

    def use(self, address: int) -> None:
        self.device.note_access(address, SIZE, READ, self.compute, "relu backward")


@pytest.fixture(params=SCHEDULES, ids=SCHEDULE_IDS)
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    made = Rig(request.param)
    yield made
    made.device.close()


def source_released_before_its_copy_was_waited_for(rig: Rig, mended: bool) -> None:
    rig.produce()
    copied = rig.offload()
    if mended:
        rig.device.wait(rig.compute, copied)
    rig.release()


def host_block_reused_before_its_last_reader(rig: Rig, mended: bool) -> None:
    rig.produce()
    copied = rig.offload()
    reloaded = rig.reload(rig.device.allocate_device(SIZE), copied)
    if mended:
        rig.device.wait(rig.out, reloaded)
    rig.offload()


def reload_into_memory_the_compute_stream_still_reads(rig: Rig, mended: bool) -> None:
    rig.produce()
    copied = rig.offload()
    rig.device.wait(rig.compute, copied)
    before = rig.device.record(rig.compute)
    rig.use(rig.memory)  # somebody still computes with the memory that becomes the target
    rig.device.wait(rig.back, rig.device.record(rig.compute) if mended else before)
    rig.device.wait(rig.back, copied)
    rig.device.copy_async(rig.memory, rig.host, SIZE, TO_DEVICE, rig.back)


def wait_on_the_wrong_record_of_a_stream(rig: Rig, mended: bool) -> None:
    rig.produce()
    earlier = rig.device.record(rig.out)
    copied = rig.offload()
    rig.device.wait(rig.compute, copied if mended else earlier)
    rig.release()


def missing_wait_on_a_demand_reload(rig: Rig, mended: bool) -> None:
    rig.produce()
    copied = rig.offload()
    target = rig.device.allocate_device(SIZE)
    rig.reload(target, copied if mended else None)


def use_before_the_reload_was_waited_for(rig: Rig, mended: bool) -> None:
    rig.produce()
    target = rig.device.allocate_device(SIZE)
    reloaded = rig.reload(target, rig.offload())
    if mended:
        rig.device.wait(rig.compute, reloaded)
    rig.use(target)


def copy_out_before_the_producer(rig: Rig, mended: bool) -> None:
    early = rig.device.record(rig.compute)
    rig.produce()
    rig.device.wait(rig.out, rig.device.record(rig.compute) if mended else early)
    rig.device.copy_async(rig.host, rig.memory, SIZE, TO_HOST, rig.out)


def kernel_packs_what_a_copy_still_writes(rig: Rig, mended: bool) -> None:
    target = rig.device.allocate_device(SIZE)
    rig.produce()
    reloaded = rig.reload(target, rig.offload())
    if mended:
        rig.device.wait(rig.compute, reloaded)
    packed = rig.device.allocate_device(SIZE)
    rig.device.launch(_C.KernelCall(_C.Kernel.PACK_BITS, target, packed, SIZE), rig.compute)


FAULTS: dict[Callable[[Rig, bool], None], tuple[str, str, str, str]] = {
    source_released_before_its_copy_was_waited_for: ("read by copy", "out", "release by storage", "compute"),
    host_block_reused_before_its_last_reader: ("read by copy", "back", "write by copy", "out"),
    reload_into_memory_the_compute_stream_still_reads: ("read by relu", "compute", "write by copy", "back"),
    wait_on_the_wrong_record_of_a_stream: ("read by copy", "out", "release by storage", "compute"),
    missing_wait_on_a_demand_reload: ("write by copy", "out", "read by copy", "back"),
    use_before_the_reload_was_waited_for: ("write by copy", "back", "read by relu", "compute"),
    copy_out_before_the_producer: ("write by relu", "compute", "read by copy", "out"),
    kernel_packs_what_a_copy_still_writes: ("write by copy", "back", "read by kernel vdnn_pack_bits", "compute"),
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_the_checker_catches(fault: Callable[[Rig, bool], None], rig: Rig) -> None:
    first, first_stream, second, second_stream = FAULTS[fault]
    with pytest.raises(errors.OrderingError) as caught:
        fault(rig, False)
    error = caught.value
    assert error.first.startswith(first)
    assert error.first_stream == first_stream
    assert error.second.startswith(second)
    assert error.second_stream == second_stream
    assert error.range_bytes == SIZE
    for part in (first, second, first_stream, second_stream, "has not waited for any event recorded", "4.00 KiB"):
        assert part in str(error), str(error)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_the_mended_twin_runs_clean(fault: Callable[[Rig, bool], None], rig: Rig) -> None:
    fault(rig, True)
    assert rig.device.checked_accesses > 0


def test_the_checker_wraps_any_device(device: _C.Device) -> None:
    """It judges calls and not their timing, so it also wraps a device that runs on hardware."""
    checked = _C.OrderingChecker(device)
    compute, out = checked.create_stream("c"), checked.create_stream("out")
    memory, host = checked.allocate_device(SIZE), checked.allocate_pinned(SIZE)
    checked.copy_async(host, memory, SIZE, TO_HOST, out)
    with pytest.raises(errors.OrderingError, match="release by note"):
        checked.note_access(memory, SIZE, RELEASE, compute)
    checked.drain(out)
    checked.free_pinned(host)
    checked.free_device(memory)


def test_violations_can_be_collected_and_the_run_goes_on(rig: Rig) -> None:
    device = _C.OrderingChecker(rig.device.inner, on_violation=_C.OnViolation.COLLECT)
    device.note_access(rig.memory, SIZE, WRITE, rig.out, "first")
    device.note_access(rig.memory, SIZE, WRITE, rig.back, "second")
    (violation,) = device.take_violations()
    assert violation.first == "write by first (operation 1)"
    assert violation.second_stream == "back"
    assert violation.missing.startswith("stream 'back' has not waited for any event recorded on stream 'out'")
    assert device.take_violations() == []


def test_only_the_bytes_that_overlap_are_in_conflict(rig: Rig) -> None:
    device = rig.device
    device.note_access(rig.memory, 100, WRITE, rig.out, "left")
    device.note_access(rig.memory + 100, 100, WRITE, rig.back, "right")  # adjacent bytes do not conflict
    with pytest.raises(errors.OrderingError) as caught:
        device.note_access(rig.memory + 50, 60, READ, rig.back, "both")
    assert caught.value.range_address == rig.memory + 50
    assert caught.value.range_bytes == 50


def test_readers_do_not_conflict_but_a_writer_conflicts_with_each(rig: Rig) -> None:
    device = rig.device
    device.note_access(rig.memory, SIZE, READ, rig.out, "a")
    device.note_access(rig.memory, SIZE, READ, rig.back, "b")
    device.wait(rig.compute, device.record(rig.out))
    with pytest.raises(errors.OrderingError) as caught:
        device.note_access(rig.memory, SIZE, WRITE, rig.compute, "c")
    assert caught.value.first_stream == "back"


@pytest.mark.parametrize("how", ["synchronize", "drain", "query", "elapsed"])
def test_what_the_host_waited_for_orders_what_it_issues_next(how: str) -> None:
    device = _C.OrderingChecker(_C.SimDevice())
    first, second = device.create_stream("first"), device.create_stream("second")
    memory = device.allocate_device(SIZE)
    begin = device.record(first, timing=True)
    device.note_access(memory, SIZE, WRITE, first, "write")
    event = device.record(first, timing=True)
    if how == "synchronize":
        device.synchronize(event)
    elif how == "drain":
        device.drain(first)
    elif how == "query":
        while not device.query(event):
            pass
    else:
        device.elapsed_ns(begin, event)
    device.note_access(memory, SIZE, WRITE, second, "write")
    device.close()


def test_freed_memory_is_forgotten() -> None:
    """An address that is allocated again after a free is new memory."""
    device = _C.OrderingChecker(_C.SimDevice())
    out, back = device.create_stream("out"), device.create_stream("back")
    seen: set[int] = set()
    for _ in range(50):
        memory = device.allocate_pinned(SIZE)
        reused = memory in seen
        seen.add(memory)
        device.note_access(memory, SIZE, WRITE, back if reused else out, "write")
        device.free_pinned(memory)
    assert len(seen) < 50  # some addresses were allocated again
    device.close()


def test_an_ordering_is_transitive(rig: Rig) -> None:
    device = rig.device
    rig.produce()
    copied = rig.offload()
    device.wait(rig.back, copied)
    device.wait(rig.compute, device.record(rig.back))
    rig.release()
