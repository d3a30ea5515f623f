"""The pinned pool: exact sizes, reuse ordered by events, a hard cap, growth ahead of need, and no lost blocks."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from tests.conftest import open_fake_device
from tests.device.device_memory import TO_DEVICE, TO_HOST
from tests.fake_driver.control import FakeDriver
from vdnn import _C, errors

KIB, MIB = 1 << 10, 1 << 20
PAGE = 4096


@pytest.fixture
def sim() -> Iterator[_C.SimDevice]:
    made = _C.SimDevice(schedule=_C.Schedule.LAZY)
    yield made
    made.close()


def test_a_block_is_as_large_as_asked_and_aligned(sim: _C.SimDevice) -> None:
    pool = _C.PinnedPool(sim, cap_bytes=64 * MIB)
    for size in (1, 255, 256, 257, 5000, 3 * MIB + 1):
        block = pool.allocate(size)
        assert block.bytes == size
        assert block.address % 256 == 0
        assert block.last_uses == []
    pool.close()


def test_a_large_request_pins_pages_and_not_a_power_of_two(sim: _C.SimDevice) -> None:
    pool = _C.PinnedPool(sim, cap_bytes=64 * MIB)
    block = pool.allocate(33 * MIB + 1)
    assert pool.stats.pinned_bytes == 33 * MIB + PAGE
    assert pool.stats.live_bytes == block.bytes
    pool.close()


def test_small_requests_share_a_slab(sim: _C.SimDevice) -> None:
    pool = _C.PinnedPool(sim, cap_bytes=64 * MIB, slab_bytes=MIB)
    blocks = [pool.allocate(1000) for _ in range(500)]
    assert pool.stats.slabs == 1
    assert len({block.address for block in blocks}) == 500
    pool.close()


def test_a_returned_block_carries_its_last_uses_to_the_next_owner(sim: _C.SimDevice) -> None:
    """The reader's event travels with the memory, so the next writer can wait on its stream and nobody polls."""
    pool = _C.PinnedPool(sim, cap_bytes=MIB)
    out, back = sim.create_stream("out"), sim.create_stream("back")
    block = pool.allocate(MIB)
    memory = sim.allocate_device(MIB)
    sim.copy_async(block.address, memory, MIB, TO_HOST, out)
    block.note_use(sim.record(out))
    sim.copy_async(memory, block.address, MIB, TO_DEVICE, back)
    last_read = sim.record(back)
    block.note_use(last_read)
    address = block.address
    del block
    again = pool.allocate(MIB)
    assert again.address == address, "reused at once, although its last reader has not run"
    assert {event.stream for event in again.last_uses} == {out, back}
    assert not sim.query(last_read)
    del again
    pool.close()


def test_of_one_streams_uses_only_the_latest_is_kept(sim: _C.SimDevice) -> None:
    pool = _C.PinnedPool(sim, cap_bytes=MIB)
    out = sim.create_stream("out")
    memory = sim.allocate_device(64)
    block = pool.allocate(64)
    for _ in range(10):
        sim.copy_async(block.address, memory, 64, TO_HOST, out)
        block.note_use(sim.record(out))
    assert len(block.last_uses) == 1
    pool.close()


def test_joined_neighbours_carry_the_uses_of_both(sim: _C.SimDevice) -> None:
    pool = _C.PinnedPool(sim, cap_bytes=MIB, slab_bytes=MIB)
    streams = [sim.create_stream(name) for name in "abcd"]
    blocks = [pool.allocate(MIB // 4) for _ in streams]
    memory = sim.allocate_device(64)
    for block, stream in zip(blocks, streams, strict=True):
        sim.copy_async(block.address, memory, 64, TO_HOST, stream)
        block.note_use(sim.record(stream))
    del block
    blocks.clear()
    whole = pool.allocate(MIB)
    assert {event.stream for event in whole.last_uses} == set(streams)
    pool.close()


def test_the_smallest_range_that_fits_is_taken(sim: _C.SimDevice) -> None:
    pool = _C.PinnedPool(sim, cap_bytes=16 * MIB, slab_bytes=4 * KIB)
    sizes = [64 * KIB, 16 * KIB, 32 * KIB]
    addresses = {size: block.address for size, block in [(size, pool.allocate(size)) for size in sizes]}
    assert pool.allocate(16 * KIB - 100).address == addresses[16 * KIB]
    assert pool.allocate(20 * KIB).address == addresses[32 * KIB]
    pool.close()


def test_the_cap_is_hard(sim: _C.SimDevice) -> None:
    pool = _C.PinnedPool(sim, cap_bytes=4 * MIB)
    held = [pool.allocate(MIB) for _ in range(4)]
    with pytest.raises(errors.PinnedMemoryError) as caught:
        pool.allocate(1)
    assert caught.value.cap_bytes == 4 * MIB
    assert caught.value.pinned_bytes == 4 * MIB
    assert isinstance(caught.value, MemoryError)
    assert "4.00 MiB" in str(caught.value)
    assert pool.stats.pinned_peak_bytes == 4 * MIB
    held.pop()
    pool.allocate(MIB)
    pool.close()


def test_a_cap_below_one_block_refuses_with_both_sizes(sim: _C.SimDevice) -> None:
    pool = _C.PinnedPool(sim, cap_bytes=PAGE)
    with pytest.raises(errors.PinnedMemoryError, match="one block is larger than the cap"):
        pool.allocate(PAGE + 1)
    assert pool.allocate(PAGE + 1, _C.Growth.LATER) is None
    assert pool.allocate(PAGE) is not None
    pool.close()


def test_idle_slabs_make_room_under_the_cap(sim: _C.SimDevice) -> None:
    pool = _C.PinnedPool(sim, cap_bytes=8 * MIB, slack=16.0)
    small = [pool.allocate(2 * MIB) for _ in range(4)]
    small.clear()
    assert pool.allocate(7 * MIB).bytes == 7 * MIB
    assert pool.stats.slabs_given_back == 4
    assert pool.stats.pinned_peak_bytes <= 8 * MIB
    pool.close()


def test_growth_beyond_what_was_ever_needed_gives_idle_slabs_back_first(sim: _C.SimDevice) -> None:
    pool = _C.PinnedPool(sim, cap_bytes=64 * MIB, slack=1.05)
    for size in (4 * MIB, 5 * MIB, 6 * MIB, 7 * MIB):
        block = pool.allocate(size)
        del block
    assert pool.stats.pinned_bytes == 7 * MIB
    pool.close()


def test_a_slab_is_given_back_only_after_its_last_reader(sim: _C.SimDevice) -> None:
    pool = _C.PinnedPool(sim, cap_bytes=8 * MIB)
    out = sim.create_stream("out")
    block = pool.allocate(4 * MIB)
    sim.copy_async(block.address, sim.allocate_device(4 * MIB), 4 * MIB, TO_HOST, out)
    busy = sim.record(out)
    block.note_use(busy)
    del block
    second = pool.allocate(5 * MIB - 512 * KIB - PAGE, _C.Growth.LATER)
    assert second is None
    pool.wait_for_growth()
    assert sim.query(busy), "the cap made the pool wait for the copy and give its slab back"
    assert pool.stats.slabs_given_back == 1
    pool.close()


def test_without_room_now_the_pool_grows_ahead_for_next_time(sim: _C.SimDevice) -> None:
    pool = _C.PinnedPool(sim, cap_bytes=16 * MIB)
    assert pool.allocate(3 * MIB, _C.Growth.LATER) is None
    assert pool.stats.refusals == 1
    pool.wait_for_growth()
    assert pool.stats.growths_ahead == 1
    block = pool.allocate(3 * MIB, _C.Growth.LATER)
    assert block is not None
    assert pool.stats.growths_awaited == 0
    pool.close()


def test_a_reservation_is_pinned_ahead_in_one_slab(sim: _C.SimDevice) -> None:
    pool = _C.PinnedPool(sim, cap_bytes=64 * MIB)
    pool.reserve(20 * MIB)
    pool.wait_for_growth()
    blocks = [pool.allocate(5 * MIB) for _ in range(4)]
    assert pool.stats.growths_awaited == 0
    assert pool.stats.slabs == 1
    assert len(blocks) == 4
    with pytest.raises(errors.PinnedMemoryError, match="reservation is larger than the cap"):
        pool.reserve(65 * MIB)
    pool.close()


def test_trimming_gives_back_what_is_idle_and_nothing_else(sim: _C.SimDevice) -> None:
    pool = _C.PinnedPool(sim, cap_bytes=64 * MIB)
    kept = pool.allocate(2 * MIB)
    dropped = pool.allocate(3 * MIB)
    del dropped
    assert pool.trim() == 3 * MIB
    assert pool.stats.pinned_bytes == 2 * MIB
    assert kept.bytes == 2 * MIB
    pool.close()


def test_a_growth_the_driver_refuses_is_reported_and_the_pool_works_on(fake_driver: FakeDriver) -> None:
    device = open_fake_device(fake_driver)
    pool = _C.PinnedPool(device, cap_bytes=64 * MIB)
    fake_driver.set_host_capacity(4 * MIB)
    with pytest.raises(errors.DriverError, match=r"cuMemHostRegister_v2 of 8\.00 MiB .*OUT_OF_MEMORY"):
        pool.allocate(8 * MIB)
    assert pool.allocate(8 * MIB, _C.Growth.LATER) is None
    pool.wait_for_growth()
    assert "CUDA_ERROR_OUT_OF_MEMORY" in pool.stats.last_growth_error
    assert pool.stats.pinned_bytes == 0
    assert pool.allocate(2 * MIB).bytes == 2 * MIB
    pool.close()
    device.close()


def test_a_pool_dropped_without_close_is_given_back_soon_after(fake_driver: FakeDriver) -> None:
    device = open_fake_device(fake_driver)
    held = [_C.PinnedPool(device, cap_bytes=MIB)]
    held[0].allocate(64 * KIB)
    assert fake_driver.calls_in(held.clear) == 0, "a destructor must not call the driver"
    assert fake_driver.live("pinned_ranges") == 0
    device.close()


def test_a_closed_pool_says_so_and_its_blocks_do_no_harm(sim: _C.SimDevice) -> None:
    pool = _C.PinnedPool(sim, cap_bytes=MIB)
    block = pool.allocate(64)
    pool.close()
    pool.close()
    for call in (lambda: pool.allocate(1), lambda: pool.reserve(1), pool.trim):
        with pytest.raises(errors.ClosedError, match="pinned pool"):
            call()
    with pytest.raises(errors.InvalidArgumentError, match="pinned by this device"):
        sim.copy_async(block.address, sim.allocate_device(64), 64, TO_HOST, sim.create_stream("s"))
    del block
    assert pool.stats.live_bytes == 0


def test_a_pool_whose_device_was_closed_says_so(sim: _C.SimDevice) -> None:
    pool = _C.PinnedPool(sim, cap_bytes=MIB)
    block = pool.allocate(64)
    sim.close()
    with pytest.raises(errors.ClosedError, match="its device was closed"):
        pool.allocate(64)
    del block
    pool.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cap_bytes": 100}, "cap_bytes: expected at least one page of 4096 bytes, got 100"),
        ({"cap_bytes": MIB, "slab_bytes": 0}, "slab_bytes: expected between 1 byte and 128 TiB, got 0"),
        ({"cap_bytes": MIB, "slack": 0.5}, "slack: expected a factor from 1 to 16"),
        ({"cap_bytes": MIB, "slack": float("nan")}, "slack: expected a factor from 1 to 16"),
    ],
)
def test_options_that_make_no_sense_are_refused(sim: _C.SimDevice, options: dict[str, float], message: str) -> None:
    with pytest.raises(errors.InvalidArgumentError, match=message):
        _C.PinnedPool(sim, **options)


@pytest.mark.parametrize("size", [0, 1 << 60])
def test_sizes_that_make_no_sense_are_refused(sim: _C.SimDevice, size: int) -> None:
    pool = _C.PinnedPool(sim, cap_bytes=MIB)
    with pytest.raises(errors.InvalidArgumentError, match=f"between 1 byte and 128 TiB, got {size}"):
        pool.allocate(size)
    with pytest.raises(TypeError):
        pool.allocate(-1)
    pool.close()


def test_a_pool_needs_a_device() -> None:
    with pytest.raises(TypeError):
        _C.PinnedPool(None)  # type: ignore[arg-type]


def test_without_a_cap_the_hosts_own_limits_hold(sim: _C.SimDevice) -> None:
    pool = _C.PinnedPool(sim)
    limits = _C.host_limits()
    assert 0 < pool.stats.cap_bytes <= limits.total_bytes
    pool.close()


def test_threads_share_a_pool(sim: _C.SimDevice) -> None:
    pool = _C.PinnedPool(sim, cap_bytes=64 * MIB)
    failures: list[BaseException] = []

    def work(size: int) -> None:
        try:
            for turn in range(300):
                blocks = [pool.allocate(size + turn) for _ in range(3)]
                assert len({block.address for block in blocks}) == 3
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(size,)) for size in (100, 5_000, 70_000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert pool.stats.live_bytes == 0
    pool.close()


def test_room_is_what_blocks_of_a_size_can_still_take(sim: _C.SimDevice) -> None:
    """Free pieces beside other blocks count for blocks that they hold; what is unpinned or idle counts for all."""
    pool = _C.PinnedPool(sim, cap_bytes=10 * MIB, slab_bytes=4 * MIB)
    assert pool.room_bytes(MIB) == 10 * MIB
    pieces = [pool.allocate(MIB) for _ in range(4)]
    assert pool.room_bytes(MIB) == 6 * MIB
    del pieces[0], pieces[1]  # two pieces of a MiB each, with one that is taken between them
    assert pool.room_bytes(MIB) == 8 * MIB
    assert pool.room_bytes(MIB + 1) == 6 * MIB
    pieces.clear()
    assert pool.room_bytes(8 * MIB) == 10 * MIB, "an idle slab makes room"
    pool.close()
