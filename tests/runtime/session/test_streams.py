"""Work on several streams of one device, each an adopted one of the simulated device, under the checker."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

import vdnn
from vdnn import _C
from vdnn.runtime.storage import transport as transport_room
from vdnn.runtime.storage.transport import Transport, TransportOptions


class Streams:
    """A device on which torch computes on `now`, as the test says."""

    def __init__(self) -> None:
        self.device = _C.OrderingChecker(_C.SimDevice(schedule=_C.Schedule.LAZY), on_violation=_C.OnViolation.COLLECT)
        self.first, self.second = self.device.adopt_stream(1), self.device.adopt_stream(2)
        self.now = self.first

    def switch(self, stream: _C.Stream) -> None:
        """As a program does that knows its streams: the new one waits for the old one."""
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


def test_what_another_stream_allocated_goes_back_only_behind_its_copy(streams: Streams) -> None:
    """Found by writing a test for GPUs: torch gives memory back to the stream that allocated it, which here is not
    the one of the save, and that one alone had been made to wait for the copy."""
    x = torch.randn(1024, requires_grad=True)
    with vdnn.offload(device=streams.device, min_bytes=0, offload_window=1) as session:
        # What is saved once `h` is gone is allocated before: to a later tensor the CPU's allocator may give the memory
        # of `h`, of whatever stream, and its copy would be taken for that of `h`.
        early = [x * factor for factor in range(3, 6)]
        h = x * 2
        warm_up = early[0].sin().cos()  # the session has seen the first stream
        # On the host no stream orders what is given up: the checker would see that, and nothing of the copy behind it.
        (transport,) = session._opened()
        transport.release_context = replace(transport.release_context, notes_releases=False)
        address, nbytes = h.data_ptr(), h.nbytes
        streams.switch(streams.second)
        y = h.sin()
        del h
        y = [one.sin() for one in (y, *early[1:])]
        assert session.counters.freed_bytes >= nbytes
        # The first stream's allocator may hand the memory out now, to somebody who writes it.
        streams.device.note_access(address, nbytes, _C.Access.WRITE, streams.first, "next tensor of the first stream")
    # Only against copies: the CPU's allocator gives memory of one stream to another anywhere, `h`'s to `y` among it.
    violations = streams.device.take_violations()
    assert [one.first for one in violations if "vdnn offload" in (one.first_stream, one.second_stream)] == []
    assert session.counters.storages > 2
    assert {one.shape for one in (*y, warm_up)} == {(1024,)}
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
    (transport,) = session._opened()
    session.close()
    assert transport.device.closed, "it was made for the session"


def test_the_current_stream_of_a_gpu_is_read_at_every_call_and_made_known_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen on a simulated device that stands for one: torch says a handle, each handle is one stream."""
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
