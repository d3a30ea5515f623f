"""The transfer queue over every device: the right bytes, windows in bytes, batches, and safe ownership."""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Iterator

import pytest

from tests.device.device_memory import download
from tests.transfer.transfer_rig import KIB, MIB, TransferRig
from vdnn import _C, errors


@pytest.fixture
def rig(device: _C.Device) -> Iterator[TransferRig]:
    """Over a checker, so that every edge the queue needs is proven on every device."""
    made = TransferRig(_C.OrderingChecker(device))
    yield made
    made.close()


@pytest.fixture
def lazy() -> Iterator[_C.Device]:
    made = _C.OrderingChecker(_C.SimDevice(schedule=_C.Schedule.LAZY))
    yield made
    made.close()


@pytest.mark.parametrize("size", [1, 255, 4 * KIB, 64 * KIB, 64 * KIB + 1, 3 * MIB + 7])
def test_an_offloaded_storage_comes_back_as_it_was(rig: TransferRig, size: int) -> None:
    storage = rig.storage(size)
    copy = rig.offload(storage)
    assert rig.queue.release(copy)
    rig.device.note_access(storage.address, size, _C.Access.RELEASE, rig.compute, "dropped")
    reload, target = rig.reload(copy)
    rig.queue.wait(reload, rig.compute)
    assert rig.read(target, size) == storage.content


def test_a_copy_may_be_reloaded_any_number_of_times(rig: TransferRig) -> None:
    storage = rig.storage(MIB)
    copy = rig.offload(storage)
    for _ in range(3):
        reload, target = rig.reload(copy)
        rig.queue.wait(reload, rig.compute)
        assert rig.read(target, MIB) == storage.content


def test_many_steps_reuse_the_same_host_memory(rig: TransferRig) -> None:
    sizes = [5, 70 * KIB, 512 * KIB, 1000, MIB]
    storages = [rig.storage(size, seed) for seed, size in enumerate(sizes)]
    for _ in range(5):
        copies = [rig.offload(storage) for storage in storages]
        for copy in copies:
            rig.queue.release(copy)
        for storage, copy in zip(reversed(storages), reversed(copies), strict=True):
            reload, target = rig.reload(copy)
            rig.queue.wait(reload, rig.compute)
            assert rig.read(target, storage.size) == storage.content
            rig.device.free_device(target)
        del copy, copies
    assert rig.pool.stats.pinned_bytes <= sum(sizes) + MIB + 3 * 4096
    assert rig.pool.stats.live_bytes == 0


def test_another_stream_may_wait_for_a_reload(rig: TransferRig) -> None:
    side = rig.device.create_stream("side")
    storage = rig.storage(MIB)
    reload, target = rig.reload(rig.offload(storage))
    rig.queue.wait(reload, side)
    rig.device.note_access(target, MIB, _C.Access.READ, side, "side stream")
    rig.device.note_access(target, MIB, _C.Access.READ, rig.compute, "the owner stream waited too")
    rig.queue.wait(reload, side)  # again is harmless


def test_the_producer_may_be_another_stream_than_the_owner(lazy: _C.Device) -> None:
    rig = TransferRig(lazy)
    side = rig.device.create_stream("side")
    storage = rig.storage(MIB)
    rig.device.wait(side, rig.device.record(rig.compute))
    rig.device.note_access(storage.address, MIB, _C.Access.WRITE, side, "produced on the side")
    copy = rig.queue.offload(storage.address, MIB, side, owner=rig.compute)
    assert copy is not None
    rig.queue.release(copy)
    rig.device.note_access(storage.address, MIB, _C.Access.RELEASE, rig.compute, "dropped")
    rig.close()


# Ownership.


def test_a_source_is_held_until_its_owner_stream_waits_for_the_copy(lazy: _C.Device) -> None:
    rig = TransferRig(lazy)
    copy = rig.offload(rig.storage(MIB), "source")
    gc.collect()
    assert rig.gone == []
    assert rig.queue.stats.offload_in_flight_bytes == MIB
    assert rig.queue.release(copy)
    assert rig.gone == [], "handed back, not dropped inside"
    (released,) = rig.queue.take_released()
    assert released.name == "source"
    del released
    assert rig.gone == ["source"]
    assert rig.queue.stats.offload_in_flight_bytes == 0
    assert rig.queue.release(copy), "again is harmless"
    assert rig.queue.take_released() == []
    rig.close()


def test_a_target_is_held_until_a_stream_waits_for_the_reload(lazy: _C.Device) -> None:
    rig = TransferRig(lazy)
    reload, _ = rig.reload(rig.offload(rig.storage(MIB)), "target")
    gc.collect()
    assert rig.gone == []
    rig.queue.wait(reload, rig.compute)
    assert rig.gone == ["target"]
    rig.close()


def test_a_copy_dropped_in_flight_gives_its_source_and_its_block_back_in_order(lazy: _C.Device) -> None:
    """A graph that dies right after its forward: the checker sees that nothing is reused too early."""
    rig = TransferRig(lazy, cap_bytes=2 * MIB)
    first = rig.storage(MIB, 1)
    copy = rig.offload(first, "first")
    address = copy.block.address
    del copy
    assert rig.gone == []
    second = rig.storage(MIB, 2)
    again = rig.offload(second, "second")
    assert again.block.address == address, "the host block is reused behind the copy that still writes it"
    assert [hold.name for hold in rig.queue.take_released()] == ["first"]
    rig.device.note_access(first.address, MIB, _C.Access.RELEASE, rig.compute, "dropped")
    reload, target = rig.reload(again)
    rig.queue.wait(reload, rig.compute)
    assert rig.read(target, MIB) == second.content
    rig.close()


def test_a_reload_dropped_unwaited_keeps_its_target_until_the_consumer_stream_waits(lazy: _C.Device) -> None:
    rig = TransferRig(lazy)
    reload, target = rig.reload(rig.offload(rig.storage(MIB)), "target")
    del reload
    assert rig.gone == []
    rig.queue.collect()
    assert rig.gone == ["target"]
    rig.device.note_access(target, MIB, _C.Access.RELEASE, rig.compute, "dropped")
    rig.close()


def test_a_copy_dropped_while_still_in_a_batch_is_never_made(lazy: _C.Device) -> None:
    rig = TransferRig(lazy)
    copy = rig.offload(rig.storage(KIB), "source")
    assert rig.queue.state(copy) == _C.CopyState.QUEUED
    del copy
    rig.queue.collect()
    assert [hold.name for hold in rig.queue.take_released()] == ["source"]
    assert rig.gone == ["source"]
    assert rig.queue.stats.cancelled == 1
    assert rig.queue.stats.submissions == 0
    rig.close()


def test_closing_waits_for_the_copies_and_hands_everything_back(rig: TransferRig) -> None:
    storage = rig.storage(MIB)
    copy = rig.offload(storage, "source")
    reload, _ = rig.reload(copy, "target")
    rig.queue.close()
    assert [hold.name for hold in rig.queue.take_released()] == ["source"]
    assert sorted(rig.gone) == ["source", "target"]
    assert rig.queue.stats.offload_in_flight_bytes == rig.queue.stats.reload_in_flight_bytes == 0
    for call in (
        lambda: rig.offload(storage),
        lambda: rig.reload(copy),
        lambda: rig.queue.release(copy),
        lambda: rig.queue.wait(reload, rig.compute),
        rig.queue.flush,
        rig.queue.collect,
    ):
        with pytest.raises(errors.ClosedError, match="transfer queue"):
            call()
    rig.queue.close()


def test_a_queue_closed_with_a_batch_waiting_keeps_those_sources_reachable(lazy: _C.Device) -> None:
    rig = TransferRig(lazy)
    copy = rig.offload(rig.storage(KIB), "source")
    rig.queue.close()
    assert rig.queue.state(copy) == _C.CopyState.FAILED
    reason, source = rig.queue.failure(copy)
    assert "closed before the copy was submitted" in reason
    assert source.name == "source"
    del source, copy
    gc.collect()
    assert rig.gone == ["source"]
    rig.close()


def test_a_queue_dropped_without_close_keeps_what_copies_touch_until_the_next(lazy: _C.Device) -> None:
    rig = TransferRig(lazy)
    copy = rig.offload(rig.storage(MIB), "source")
    reload, _ = rig.reload(copy, "target")
    pool, gone = rig.pool, rig.gone
    del rig, copy, reload
    gc.collect()
    assert gone == []
    queue = _C.TransferQueue(lazy, pool)
    queue.collect()
    assert sorted(gone) == ["source", "target"]
    queue.close()
    pool.close()


def test_keepalives_are_destroyed_where_python_code_may_run(lazy: _C.Device) -> None:
    """A keepalive whose destructor calls the queue again: a lock held over the drop would dead-lock here."""
    rig = TransferRig(lazy)

    class Reentrant:
        def __del__(self) -> None:
            rig.queue.collect()
            rig.gone.append(f"saw {rig.queue.stats.reloads} reloads")

    copy = rig.offload(rig.storage(MIB))
    target = rig.device.allocate_device(MIB)
    reload = rig.queue.reload(copy, target, rig.compute, keepalive=Reentrant(), demand=True)
    rig.queue.wait(reload, rig.compute)
    assert rig.gone == ["saw 1 reloads"]
    rig.close()


# Windows.


def test_the_offload_window_makes_the_owner_stream_wait_and_never_the_host(lazy: _C.Device) -> None:
    rig = TransferRig(lazy, {"offload_window_bytes": 2 * MIB})
    copies = [rig.offload(rig.storage(MIB, seed), f"source {seed}") for seed in range(4)]
    assert rig.queue.stats.offload_in_flight_bytes == 2 * MIB
    assert rig.queue.stats.window_waits == 2
    assert [hold.name for hold in rig.queue.take_released()] == ["source 0", "source 1"]
    assert all(rig.queue.state(copy) == _C.CopyState.SUBMITTED for copy in copies)
    rig.close()


def test_a_copy_larger_than_the_window_goes_alone(lazy: _C.Device) -> None:
    rig = TransferRig(lazy, {"offload_window_bytes": MIB, "reload_window_bytes": MIB})
    rig.offload(rig.storage(MIB // 2), "small")
    large = rig.offload(rig.storage(3 * MIB), "large")
    assert [hold.name for hold in rig.queue.take_released()] == ["small"]
    target = rig.device.allocate_device(3 * MIB)
    assert rig.queue.reload(large, target, rig.compute) is not None
    rig.close()


def test_a_full_reload_window_refuses_all_but_demand(lazy: _C.Device) -> None:
    rig = TransferRig(lazy, {"reload_window_bytes": 2 * MIB})
    copies = [rig.offload(rig.storage(MIB, seed)) for seed in range(4)]
    targets = [rig.device.allocate_device(MIB) for _ in copies]
    first = rig.queue.reload(copies[3], targets[3], rig.compute)
    second = rig.queue.reload(copies[2], targets[2], rig.compute)
    assert first is not None
    assert second is not None
    assert rig.queue.reload(copies[1], targets[1], rig.compute) is None
    assert rig.queue.stats.refused_reloads == 1
    on_demand = rig.queue.reload(copies[1], targets[1], rig.compute, demand=True)
    assert on_demand is not None
    assert rig.queue.stats.reload_in_flight_bytes == 3 * MIB
    for reload in (first, second, on_demand):
        rig.queue.wait(reload, rig.compute)
    assert rig.queue.reload(copies[0], targets[0], rig.compute) is not None
    rig.close()


# Batches.


def test_small_copies_share_one_submission(lazy: _C.Device) -> None:
    rig = TransferRig(lazy, {"small_copy_bytes": 4 * KIB, "batch_bytes": 64 * KIB})
    storages = [rig.storage(4 * KIB, seed) for seed in range(16)]
    copies = [rig.offload(storage) for storage in storages]
    assert rig.queue.stats.submissions == 1
    assert {rig.queue.state(copy) for copy in copies} == {_C.CopyState.SUBMITTED}
    for storage, copy in zip(storages, copies, strict=True):
        reload, target = rig.reload(copy)
        rig.queue.wait(reload, rig.compute)
        assert rig.read(target, storage.size) == storage.content
    rig.close()


@pytest.mark.parametrize("why", ["release", "reload", "ready", "flush", "large", "other stream"])
def test_a_batch_is_submitted_as_soon_as_anybody_needs_it(lazy: _C.Device, why: str) -> None:
    rig = TransferRig(lazy)
    storage = rig.storage(KIB)
    copy = rig.offload(storage)
    assert rig.queue.state(copy) == _C.CopyState.QUEUED
    if why == "release":
        rig.queue.release(copy)
    elif why == "reload":
        rig.reload(copy)
    elif why == "ready":
        assert not rig.queue.ready(copy).empty
    elif why == "flush":
        rig.queue.flush()
    elif why == "large":
        rig.offload(rig.storage(MIB))
    else:
        side = rig.device.create_stream("side")
        rig.queue.offload(rig.storage(KIB).address, KIB, side, keepalive=None)
    assert rig.queue.state(copy) == _C.CopyState.SUBMITTED
    rig.close()


def test_the_host_may_read_a_block_after_ready(rig: TransferRig) -> None:
    storage = rig.storage(10 * KIB)
    copy = rig.offload(storage)
    rig.device.synchronize(rig.queue.ready(copy))
    assert ctypes.string_at(copy.block.address, copy.bytes) == storage.content


# Refusals.


def test_without_host_memory_the_storage_stays_where_it_is(lazy: _C.Device) -> None:
    rig = TransferRig(lazy, cap_bytes=MIB)
    storage = rig.storage(2 * MIB)
    refused = rig.queue.offload(
        storage.address, 2 * MIB, rig.compute, keepalive=rig.hold("source"), growth=_C.Growth.LATER
    )
    assert refused is None
    assert rig.gone == ["source"], "nothing is held for a copy that is not made"
    assert rig.queue.stats.refused_offloads == 1
    with pytest.raises(errors.PinnedMemoryError):
        rig.offload(storage)
    rig.close()


def test_bad_arguments_are_refused_before_anything_is_held(rig: TransferRig) -> None:
    other = _C.SimDevice(name="other")
    foreign = other.create_stream("foreign")
    storage = rig.storage(KIB)
    with pytest.raises(errors.InvalidArgumentError, match="bytes: expected at least 1 byte, got 0"):
        rig.queue.offload(storage.address, 0, rig.compute)
    with pytest.raises(errors.InvalidArgumentError, match="got null"):
        rig.queue.offload(0, KIB, rig.compute)
    with pytest.raises(errors.InvalidArgumentError, match="at most 128 TiB"):
        rig.queue.offload(storage.address, 1 << 50, rig.compute)
    with pytest.raises(TypeError):
        rig.queue.offload(storage.address, -1, rig.compute)
    for streams in ({"producer": foreign}, {"producer": rig.compute, "owner": foreign}):
        with pytest.raises(errors.DeviceMismatchError):
            rig.queue.offload(storage.address, KIB, keepalive=rig.hold("source"), **streams)
    assert rig.gone == ["source", "source"]
    with pytest.raises(TypeError):
        rig.queue.reload(None, storage.address, rig.compute)  # type: ignore[arg-type]
    copy = rig.offload(storage)
    with pytest.raises(errors.InvalidArgumentError, match="target: expected an address, got null"):
        rig.queue.reload(copy, 0, rig.compute)
    assert rig.pool.stats.live_bytes == KIB
    other.close()


def test_a_queue_takes_only_a_pool_of_its_own_device(lazy: _C.Device) -> None:
    other = _C.SimDevice()
    with pytest.raises(errors.DeviceMismatchError, match="pinned pool does not belong to device"):
        _C.TransferQueue(lazy, _C.PinnedPool(other, cap_bytes=MIB))
    for window in ("offload_window_bytes", "reload_window_bytes"):
        with pytest.raises(errors.InvalidArgumentError, match=f"{window}: expected at least 1 byte, got 0"):
            _C.TransferQueue(lazy, _C.PinnedPool(lazy, cap_bytes=MIB), **{window: 0})
    other.close()


def test_threads_with_streams_of_their_own_share_a_queue(rig: TransferRig) -> None:
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            stream = rig.device.create_stream(f"thread {seed}")
            for turn in range(10):
                storage = rig.storage(100 * KIB + seed, seed + turn)
                copy = rig.queue.offload(storage.address, storage.size, stream, keepalive=storage)
                assert copy is not None
                rig.queue.release(copy)
                target = rig.device.allocate_device(copy.bytes)
                reload = rig.queue.reload(copy, target, stream, demand=True)
                assert reload is not None
                rig.queue.wait(reload, stream)
                assert download(rig.device, stream, target, storage.size) == storage.content
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    rig.queue.take_released()
