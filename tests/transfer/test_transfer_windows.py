"""Windows in bytes, and batches of small copies."""

from __future__ import annotations

import pytest

from tests.transfer.transfer_rig import KIB, MIB, TransferRig
from vdnn import _C


def test_the_offload_window_makes_the_owner_stream_wait_and_never_the_host(lazy: _C.Device) -> None:
    rig = TransferRig(lazy, {"offload_window_bytes": 2 * MIB})
    copies = [rig.offload(rig.storage(MIB, seed), f"source {seed}") for seed in range(4)]
    assert rig.queue.stats.offload_in_flight_bytes == 2 * MIB
    assert rig.queue.stats.window_waits == 2
    assert [hold.name for hold in rig.queue.take_released()] == ["source 0", "source 1"]
    assert all(rig.queue.state(copy) == _C.CopyState.SUBMITTED for copy in copies)
    rig.close()


def test_a_copy_larger_than_the_window_goes_alone(lazy: _C.Device) -> None:
    rig = TransferRig(lazy, {"offload_window_bytes": MIB})
    rig.offload(rig.storage(MIB // 2), "small")
    large = rig.offload(rig.storage(3 * MIB), "large")
    assert [hold.name for hold in rig.queue.take_released()] == ["small"]
    rig.reload(large)
    rig.close()


def test_reloads_in_flight_are_counted_until_a_stream_waits_for_them(lazy: _C.Device) -> None:
    rig = TransferRig(lazy)
    copies = [rig.offload(rig.storage(MIB, seed)) for seed in range(3)]
    reloads = [rig.reload(copy)[0] for copy in copies]
    assert rig.queue.stats.reload_in_flight_bytes == 3 * MIB
    for reload in reloads:
        rig.queue.wait(reload, rig.compute)
    assert rig.queue.stats.reload_in_flight_bytes == 0
    rig.close()


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
