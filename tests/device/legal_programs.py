"""Random programs over streams, copies, kernels and events that are legal by construction.

A program keeps, for each buffer, the events after its last write and after its reads since. Before an operation it
waits for the events it needs, in a random one of the legal ways: on the event itself, on a later record of the same
stream, or by a host wait. A sequential model says which bytes every buffer must hold in the end. `run` executes the
program on a device.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

from hypothesis import strategies as st

from tests.device.device_memory import TO_DEVICE, TO_HOST
from vdnn import _C

BUFFER_BYTES = 192
BUFFERS = 3  # on the device, and as many on the host


@dataclass(frozen=True)
class Step:
    """One operation: its kind, its stream, its buffers, its byte range, and how it waits."""

    kind: str  # "offload", "reload", "fill", "pack", "release"
    stream: int
    device_buffer: int
    host_buffer: int
    begin: int
    size: int
    way_to_wait: str  # "event", "later", "host"
    value: int


def steps() -> st.SearchStrategy[list[Step]]:
    step = st.builds(
        Step,
        kind=st.sampled_from(["offload", "offload", "reload", "reload", "fill", "pack", "release"]),
        stream=st.integers(0, 2),
        device_buffer=st.integers(0, BUFFERS - 1),
        host_buffer=st.integers(0, BUFFERS - 1),
        begin=st.integers(0, BUFFER_BYTES - 8),
        size=st.integers(1, BUFFER_BYTES),
        way_to_wait=st.sampled_from(["event", "event", "later", "host"]),
        value=st.integers(0, 255),
    )
    return st.lists(step, min_size=1, max_size=25)


@dataclass
class Buffer:
    """Memory, its expected content, and the events of its last accesses."""

    address: int
    content: bytearray
    last_write: list[_C.Event] = field(default_factory=list)
    reads: list[_C.Event] = field(default_factory=list)


class Program:
    """Runs steps on a device and updates the model beside it."""

    def __init__(self, device: _C.Device) -> None:
        self.device = device
        self.streams = [device.adopt_stream(0), device.create_stream("a"), device.create_stream("b")]
        self.on_device = [self.buffer(device.allocate_device(BUFFER_BYTES)) for _ in range(BUFFERS)]
        self.on_host = [self.buffer(device.allocate_pinned(BUFFER_BYTES)) for _ in range(BUFFERS)]

    @staticmethod
    def buffer(address: int) -> Buffer:
        ctypes.memset(address, 0, BUFFER_BYTES)
        return Buffer(address, bytearray(BUFFER_BYTES))

    def order(self, stream: _C.Stream, events: list[_C.Event], way: str) -> None:
        for event in events:
            if way == "host":
                self.device.synchronize(event)
            elif way == "later":
                assert event.stream is not None
                self.device.wait(stream, self.device.record(event.stream))
            else:
                self.device.wait(stream, event)

    def touch(self, step: Step, reads: list[Buffer], writes: list[Buffer]) -> _C.Stream:
        """Makes the stream wait for all accesses that the operation must follow."""
        stream = self.streams[step.stream]
        for buffer in reads:
            self.order(stream, buffer.last_write, step.way_to_wait)
        for buffer in writes:
            self.order(stream, buffer.last_write + buffer.reads, step.way_to_wait)
        return stream

    def touched(self, stream: _C.Stream, reads: list[Buffer], writes: list[Buffer]) -> None:
        event = self.device.record(stream)
        for buffer in reads:
            buffer.reads.append(event)
        for buffer in writes:
            buffer.last_write, buffer.reads = [event], []

    def copy(self, step: Step, source: Buffer, target: Buffer, direction: _C.CopyDirection) -> None:
        end = min(step.begin + step.size, BUFFER_BYTES)
        size = end - step.begin
        stream = self.touch(step, [source], [target])
        self.device.copy_async(target.address + step.begin, source.address + step.begin, size, direction, stream)
        target.content[step.begin : end] = source.content[step.begin : end]
        self.touched(stream, [source], [target])

    def pack(self, step: Step, source: Buffer, target: Buffer) -> None:
        """Packs each byte of another buffer into a bit."""
        stream = self.touch(step, [source], [target])
        call = _C.KernelCall(_C.Kernel.PACK_BITS, source.address, target.address, BUFFER_BYTES)
        self.device.launch(call, stream)
        for byte in range(-(-BUFFER_BYTES // 8)):
            elements = source.content[8 * byte : 8 * byte + 8]
            target.content[byte] = sum(1 << bit for bit, element in enumerate(elements) if element != 0)
        self.touched(stream, [source], [target])

    def fill(self, step: Step, buffer: Buffer, value: int, access: _C.Access) -> None:
        """Writes to the buffer, either by torch on the calling thread or by the poisoning of released memory."""
        stream = self.touch(step, [], [buffer])
        if access == _C.Access.WRITE:
            self.device.synchronize(self.device.record(stream))  # the calling thread writes after its stream
            self.order(stream, buffer.last_write + buffer.reads, "host")
            ctypes.memset(buffer.address, value, BUFFER_BYTES)
        self.device.note_access(buffer.address, BUFFER_BYTES, access, stream, "fill")
        if access == _C.Access.WRITE or self.device.info.kind == "sim":  # a GPU does not poison memory
            buffer.content[:] = bytes([value]) * BUFFER_BYTES
        self.touched(stream, [], [buffer])

    def run(self, program: list[Step]) -> None:
        for step in program:
            device_buffer, host_buffer = self.on_device[step.device_buffer], self.on_host[step.host_buffer]
            if step.kind == "offload":
                self.copy(step, device_buffer, host_buffer, TO_HOST)
            elif step.kind == "reload":
                self.copy(step, host_buffer, device_buffer, TO_DEVICE)
            elif step.kind == "pack":
                other = self.on_device[(step.device_buffer + 1) % BUFFERS]
                self.pack(step, device_buffer, other)
            elif step.kind == "fill":
                self.fill(step, device_buffer, step.value, _C.Access.WRITE)
            else:
                self.fill(step, device_buffer, 0xFF, _C.Access.RELEASE)

    def differences(self) -> list[str]:
        for stream in self.streams:
            self.device.drain(stream)
        buffers = {f"device {i}": b for i, b in enumerate(self.on_device)}
        buffers |= {f"host {i}": b for i, b in enumerate(self.on_host)}
        return [
            name
            for name, buffer in buffers.items()
            if ctypes.string_at(buffer.address, BUFFER_BYTES) != bytes(buffer.content)
        ]
