"""Lifetimes of sources, targets and host blocks while copies run, including objects that are dropped mid-flight."""

from __future__ import annotations

import functools
import gc

import pytest

from tests.transfer.transfer_rig import KIB, MIB, TransferRig
from vdnn import _C, errors


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
    """A graph may be freed right after its forward pass. The checker sees that nothing is reused too early."""
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


def test_a_queue_dropped_without_close_keeps_what_copies_touch_until_they_are_over(lazy: _C.Device) -> None:
    rig = TransferRig(lazy)
    held = [rig.queue, rig.offload(rig.storage(MIB), "source")]
    held.append(rig.reload(held[1], "target")[0])
    pool, gone = rig.pool, rig.gone
    del rig
    seen_at_once = list(map(functools.partial.__call__, (functools.partial(held.clear), functools.partial(gone.copy))))
    assert seen_at_once[1] == [], "a destructor must not wait for copies"
    assert sorted(gone) == ["source", "target"], "soon after, they were waited for"
    pool.close()


def test_keepalives_are_destroyed_where_python_code_may_run(lazy: _C.Device) -> None:
    """The destructor of this keepalive calls the queue again, so holding a lock during the drop would deadlock."""
    rig = TransferRig(lazy)

    class Reentrant:
        def __del__(self) -> None:
            rig.queue.collect()
            rig.gone.append(f"saw {rig.queue.stats.reloads} reloads")

    copy = rig.offload(rig.storage(MIB))
    target = rig.device.allocate_device(MIB)
    reload = rig.queue.reload(copy, target, rig.compute, keepalive=Reentrant())
    rig.queue.wait(reload, rig.compute)
    assert rig.gone == ["saw 1 reloads"]
    rig.close()


def test_the_streams_of_a_dropped_queue_are_those_of_a_later_one(lazy: _C.Device) -> None:
    """Also where its copies still run: those of the later queue run behind them."""
    rig = TransferRig(lazy)
    streams = rig.queue.offload_stream, rig.queue.reload_stream
    beside = _C.TransferQueue(lazy, rig.pool)
    assert beside.offload_stream not in streams, "each queue that is alive has its own"
    first = rig.storage(MIB, 1)
    copy = rig.offload(first)
    rig.queue = beside
    later = _C.TransferQueue(lazy, rig.pool)  # takes over what the dropped queue left
    rig.queue = _C.TransferQueue(lazy, rig.pool)
    assert (rig.queue.offload_stream, rig.queue.reload_stream) == streams
    second = rig.storage(MIB, 2)
    reload, target = rig.reload(rig.offload(second))
    rig.queue.wait(reload, rig.compute)
    assert rig.read(target, MIB) == second.content
    del copy
    for queue in (beside, later):
        queue.close()
    rig.close()
