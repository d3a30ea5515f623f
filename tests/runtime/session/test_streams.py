"""Work on several streams of one device, each adopted from the simulated device, under the ordering checker."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import vdnn
from vdnn import _C
from vdnn.runtime.session import engine as engine_room
from vdnn.runtime.storage import transport as transport_room
from vdnn.runtime.storage.transport import Transport, TransportOptions

READER = "the sine reads h"


class Streams:
    """A device on which torch computes on the stream `now`, which the test chooses."""

    def __init__(self) -> None:
        self.device = _C.OrderingChecker(_C.SimDevice(schedule=_C.Schedule.LAZY), on_violation=_C.OnViolation.COLLECT)
        self.first, self.second = self.device.adopt_stream(1), self.device.adopt_stream(2)
        self.now = self.first

    def switch(self, stream: _C.Stream) -> None:
        """Switches streams as a correct program does: the new stream waits for the old one."""
        self.device.wait(stream, self.device.record(self.now))
        self.now = stream


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[Streams]:
    streams = Streams()

    def current_stream(transport: Transport) -> _C.Stream:
        transport.streams[streams.now] = None
        return streams.now

    monkeypatch.setattr(Transport, "current_stream", current_stream)
    yield streams
    streams.device.close()


def test_what_another_stream_allocated_goes_back_only_behind_its_copy_and_its_readers(streams: Streams) -> None:
    """Torch returns memory to the stream that allocated it, and that need not be the stream of the save. Two mistakes
    that a test for GPUs found: only the stream of the save waited for the copy; and the stream that allocated it waited
    for the copy, but not for the operation that saved it, which is issued after the copy and reads it, too."""
    x = torch.randn(24_576, requires_grad=True)  # so large that its copy does not wait for others
    with vdnn.offload(device=streams.device, min_bytes=0, limits=vdnn.Limits(offload_window=1)) as session:
        # Tensors that are saved after `h` is released are allocated before. To a later tensor the CPU's allocator may
        # give the memory of `h`, whatever its stream, and the copy of that tensor would be taken for a copy of `h`.
        early = [x * factor for factor in range(3, 6)]
        h = x * 2
        warm_up = early[0].sin().cos()  # shows the first stream to the session
        # On the CPU no stream orders releases. The checker would report that, and not a missing wait for the copy.
        (transport,) = session._engine.transports.opened()
        transport.release_context = replace(transport.release_context, notes_releases=False)
        address, nbytes, of_h = h.data_ptr(), h.nbytes, StorageWeakRef(h.untyped_storage())
        streams.switch(streams.second)
        kept = [h.sin()]
        # What the kernel of this operation does on a GPU.
        streams.device.note_access(address, nbytes, _C.Access.READ, streams.second, READER)
        del h
        # No longer: what is released later makes the first stream wait for later copies, and by that for the reader.
        following = iter([kept[0], *early[1:]])
        while not of_h.expired():
            kept.append(next(following).sin())
        # From here on the first stream's allocator may give the memory to a new owner, which writes to it.
        streams.device.note_access(address, nbytes, _C.Access.WRITE, streams.first, "next tensor of the first stream")
    # Only violations against copies and the reader count: the CPU's allocator moves memory freely between streams, for
    # example from `h` to `y`.
    violations = streams.device.take_violations()
    found = [" ".join((one.first, one.first_stream, one.second, one.second_stream)) for one in violations]
    assert [text for text in found if READER in text or "vdnn offload" in text] == []
    assert session.counters.storages >= 2
    assert {one.shape for one in (*kept, warm_up)} == {(24_576,)}
    session.close()


def test_a_session_closes_no_device_that_it_was_given() -> None:
    device = _C.SimDevice()
    session = vdnn.offload(device=device, min_bytes=0)
    with session:
        torch.randn(8, requires_grad=True).sin().sin().sum().backward()
    session.close()
    assert not device.closed
    device.close()
    session = vdnn.offload(device="sim", min_bytes=0)
    with session:
        torch.randn(8, requires_grad=True).sin().sin().sum().backward()
    (transport,) = session._engine.transports.opened()
    session.close()
    assert transport.device.closed, "it was made for the session"


def test_the_current_stream_of_a_gpu_is_read_at_every_call_and_made_known_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses a simulated device in place of a GPU: torch returns a handle, and each handle is one stream."""
    current = [0]
    monkeypatch.setattr(transport_room, "_raw_stream", lambda index: current[index])
    device = _C.SimDevice()
    transport = Transport(torch.device("cuda", 0), device, TransportOptions(host_budget_bytes=1 << 20))
    first = transport.current_stream()
    current[0] = 7
    second = transport.current_stream()
    assert second == device.adopt_stream(7) != first
    current[0] = 0
    assert transport.current_stream() is first
    assert list(transport.streams) == [first, second]
    transport.close()
    device.close()


def test_the_stream_on_which_a_session_was_entered_waits_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hooks may run on a side stream alone, while the program allocates on the one that it entered the session on.
    Without this, a forward pass on a GPU read what the next tensor had overwritten."""
    entered = [7]
    monkeypatch.setattr(engine_room, "streams_of_thread", lambda: list(entered))
    engine = vdnn.offload(device="sim")._engine
    devices = [_C.SimDevice(), _C.SimDevice()]
    early, late = (
        Transport(torch.device("cuda", 0), one, TransportOptions(host_budget_bytes=1 << 20)) for one in devices
    )
    session = object()
    engine.transports[torch.device("cuda", 0)] = early
    engine.install(session)
    engine.install(session)
    assert list(early.streams) == [devices[0].adopt_stream(7)], "a transport that is open already"
    entered[0] = 9
    engine.install(session)
    engine._adopt_entered(late)
    assert list(late.streams) == [devices[1].adopt_stream(handle) for handle in (7, 9)], "one that is opened later"
    for _ in range(3):
        engine.uninstall(session)
    engine.close()
    late.close()
    for device in devices:
        device.close()
