"""The transfer queue over every device: correct bytes, streams that wait, and refusals."""

from __future__ import annotations

import ctypes
import threading

import pytest

from tests.device.device_memory import download
from tests.transfer.transfer_rig import KIB, MIB, TransferRig
from vdnn import _C, errors


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
    rig.queue.wait(reload, side)  # waiting again is harmless


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
    with pytest.raises(errors.InvalidArgumentError, match="offload_window_bytes: expected at least 1 byte, got 0"):
        _C.TransferQueue(lazy, _C.PinnedPool(lazy, cap_bytes=MIB), offload_window_bytes=0)
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
                reload = rig.queue.reload(copy, target, stream)
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


def test_the_host_may_read_a_block_after_ready(rig: TransferRig) -> None:
    storage = rig.storage(10 * KIB)
    copy = rig.offload(storage)
    rig.device.synchronize(rig.queue.ready(copy))
    assert ctypes.string_at(copy.block.address, copy.bytes) == storage.content
