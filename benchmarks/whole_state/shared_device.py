"""A device in virtual time whose copies and steps on the CPU share the link and the host's memory: streams and events.

A program issues operations to streams, and run() carries them out: each stream in order, each engine one operation at
a time, waits for events that were recorded before. If the running operations together ask for more than the rate of the
link or of the host's memory, each gets its share, from moment to moment. So a time is known only when everything has
been issued. The virtual machine of activation plans is different: its clock gives a copy its times when it is issued.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from vdnn.errors import VdnnError
from vdnn.planning.training.training import TrainingMachine

_LEAST_BYTES = 1e-6  # less is nothing: rates are not whole numbers


class MachineEngine(Enum):
    """The part of the machine that carries out an operation."""

    __hash__ = object.__hash__  # Enum's own is slow
    COMPUTE = "compute"
    TO_DEVICE = "to device"
    TO_HOST = "to host"
    CPU = "cpu"


class StreamPoint(NamedTuple):
    """The moment at which a stream has done its first `position` operations."""

    stream: int
    position: int


@dataclass(slots=True)
class _Operation:
    engine: MachineEngine | None  # None: waits for `event`
    amount: float = 0.0  # bytes, or nanoseconds of computing
    event: StreamPoint | None = None


@dataclass(slots=True)
class _Stream:
    waiting: deque[_Operation] = field(default_factory=deque)
    issued: int = 0
    ended_ns: list[float] = field(default_factory=list)  # of each operation that is done
    running: _Operation | None = None


class SharedDevice:
    """`moved_bytes` counts the bytes of each engine."""

    def __init__(self, machine: TrainingMachine) -> None:
        link, self._memory_rate = machine.link, machine.host_bytes_per_s / 1e9
        self._duplex_rate, self._latency_ns = link.duplex_bytes_per_s / 1e9, link.latency_ns
        self._alone = {
            MachineEngine.COMPUTE: 1.0,
            MachineEngine.TO_DEVICE: link.to_device_bytes_per_s / 1e9,
            MachineEngine.TO_HOST: link.to_host_bytes_per_s / 1e9,
            MachineEngine.CPU: min(machine.cpu_bytes_per_s, machine.host_bytes_per_s) / 1e9,
        }
        self._streams: list[_Stream] = []
        self.now_ns = 0.0
        self.moved_bytes = dict.fromkeys(MachineEngine, 0)

    def create_stream(self) -> int:
        self._streams.append(_Stream())
        return len(self._streams) - 1

    def compute(self, stream: int, duration_ns: int) -> None:
        self._issue(stream, _Operation(MachineEngine.COMPUTE, float(duration_ns)))

    def copy(self, stream: int, engine: MachineEngine, nbytes: int) -> None:
        """The latency of a copy is counted as the bytes that it could have moved alone."""
        self.moved_bytes[engine] += nbytes
        self._issue(stream, _Operation(engine, nbytes + self._latency_ns * self._alone[engine]))

    def step_on_cpu(self, stream: int, nbytes: int) -> None:
        self.moved_bytes[MachineEngine.CPU] += nbytes
        self._issue(stream, _Operation(MachineEngine.CPU, float(nbytes)))

    def record(self, stream: int) -> StreamPoint:
        return StreamPoint(stream, self._streams[stream].issued)

    def wait(self, stream: int, event: StreamPoint) -> None:
        """The stream goes on when the event has happened."""
        if event.position > self._streams[event.stream].issued:
            raise VdnnError(f"event: expected one that was recorded, got {event}.")
        self._issue(stream, _Operation(None, event=event))

    def time_ns(self, event: StreamPoint) -> float:
        """The time of an event that has happened."""
        return self._streams[event.stream].ended_ns[event.position - 1] if event.position else 0.0

    def run(self) -> None:
        """Carries out everything that was issued."""
        while True:
            self._begin_what_can()
            running = [stream.running for stream in self._streams if stream.running is not None]
            if not running:
                return  # a stream waits only for what was issued before, so nothing is left
            rates = self._rates({one.engine for one in running if one.engine is not None})
            step_ns = min(one.amount / rates[one.engine] for one in running if one.engine is not None)
            self.now_ns += step_ns
            for stream in self._streams:
                one = stream.running
                if one is None or one.engine is None:
                    continue
                one.amount -= step_ns * rates[one.engine]
                if one.amount <= _LEAST_BYTES:
                    stream.running = None
                    stream.ended_ns.append(self.now_ns)

    def _issue(self, stream: int, operation: _Operation) -> None:
        one = self._streams[stream]
        one.waiting.append(operation)
        one.issued += 1

    def _begin_what_can(self) -> None:
        changed = True
        while changed:
            changed = False
            busy = {stream.running.engine for stream in self._streams if stream.running is not None}
            for stream in self._streams:
                while stream.running is None and stream.waiting:
                    one = stream.waiting[0]
                    if one.engine is None:
                        if one.event is None or len(self._streams[one.event.stream].ended_ns) < one.event.position:
                            break
                    elif one.engine in busy:
                        break
                    changed = True
                    stream.waiting.popleft()
                    if one.engine is None or one.amount <= 0:
                        stream.ended_ns.append(self.now_ns)
                    else:
                        stream.running = one
                        busy.add(one.engine)

    def _rates(self, engines: set[MachineEngine]) -> dict[MachineEngine, float]:
        rates = {engine: self._alone[engine] for engine in engines}
        copies = [engine for engine in (MachineEngine.TO_DEVICE, MachineEngine.TO_HOST) if engine in engines]
        self._limit(rates, copies, self._duplex_rate)
        self._limit(rates, [engine for engine in engines if engine is not MachineEngine.COMPUTE], self._memory_rate)
        return rates

    def _limit(self, rates: dict[MachineEngine, float], engines: Collection[MachineEngine], most: float) -> None:
        together = sum(rates[engine] for engine in engines)
        for engine in engines:
            if together > most:
                rates[engine] *= most / together
