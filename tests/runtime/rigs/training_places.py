"""The places in which the tests of test_on_cuda.py train: a GPU, or a virtual machine with real tensors on the CPU.

A place opens sessions that move everything, counts its memory, and has a second stream if it is a GPU.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tests.runtime.rigs.limits import grouped
from tests.runtime.rigs.side_by_side import assert_nothing_alive
from vdnn import _C
from vdnn.runtime.machine.virtual_machine import VirtualMachine
from vdnn.runtime.session.offload import offload
from vdnn.runtime.session.session import Session

# Approximate clock rate of a GPU: delays need not be exact.
CYCLES_PER_US = 1500


class Place(ABC):
    """A device with a clock and a count of its memory. `size` is the factor by which its models are larger than small
    ones."""

    device: torch.device
    size: int
    # Small, so that copies wait, run and are waited for at every moment.
    window_bytes: int

    def __init__(self) -> None:
        self.sessions: list[Session] = []

    def open(self, policy: str = "vdnn-all", **options: Any) -> Session:
        """Opens a session that offloads everything."""
        sizes = {"min_bytes": 0, "offload_window": self.window_bytes, "reload_window": 2 * self.window_bytes}
        session = offload(policy, device=self._vdnn_device(), **grouped({**sizes, **options}))
        self.sessions.append(session)
        return session

    def close(self) -> None:
        self.synchronize()
        for session in self.sessions:
            assert_nothing_alive(session)
        for session in self.sessions:
            session.close()

    @abstractmethod
    def _vdnn_device(self) -> Any: ...

    @abstractmethod
    def synchronize(self) -> None: ...

    @abstractmethod
    def side_stream(self, *, waits_after: bool = True) -> contextlib.AbstractContextManager[object]:
        """A stream that waits for all work so far. Afterwards the current stream waits for it, unless `waits_after` is
        false."""

    @abstractmethod
    def delay(self, device: _C.Device, stream: _C.Stream | None, duration_ns: int) -> None:
        """Delays later work on a stream of `device`, or on the current stream."""

    @abstractmethod
    def allocated_bytes(self) -> int: ...

    @abstractmethod
    def peak_bytes_of(self, step: Callable[[], None]) -> int:
        """The peak of requested bytes while the step runs."""


class CudaPlace(Place):
    def __init__(self) -> None:
        super().__init__()
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.size = 8
        self.window_bytes = 2**20
        self._side = torch.cuda.Stream()
        self._sleeper = torch.cuda.Stream()

    def _vdnn_device(self) -> Any:
        return "cuda"

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    @contextlib.contextmanager
    def side_stream(self, *, waits_after: bool = True) -> Iterator[None]:
        current = torch.cuda.current_stream()
        self._side.wait_stream(current)
        with torch.cuda.stream(self._side):
            yield
        if waits_after:
            current.wait_stream(self._side)

    def delay(self, device: _C.Device, stream: _C.Stream | None, duration_ns: int) -> None:
        """Delays with a kernel that sleeps. For a stream of ours it runs on a stream of torch's, between two events."""
        cycles = duration_ns * CYCLES_PER_US // 1000
        if stream is None:
            torch.cuda._sleep(cycles)
            return
        between = device.adopt_stream(self._sleeper.cuda_stream)
        device.wait(between, device.record(stream))
        with torch.cuda.stream(self._sleeper):
            torch.cuda._sleep(cycles)
        device.wait(stream, device.record(between))

    def allocated_bytes(self) -> int:
        self.synchronize()
        return torch.cuda.memory_allocated()

    def peak_bytes_of(self, step: Callable[[], None]) -> int:
        self.synchronize()
        torch.cuda.reset_peak_memory_stats()
        step()
        return int(torch.cuda.memory_stats()["requested_bytes.all.peak"])


class VirtualPlace(Place):
    def __init__(self, machine: VirtualMachine) -> None:
        super().__init__()
        self.device = torch.device("cpu")
        self.size = 1
        self.window_bytes = 2**14
        self._machine = machine

    def _vdnn_device(self) -> Any:
        return self._machine

    def synchronize(self) -> None:
        pass

    def side_stream(self, *, waits_after: bool = True) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def delay(self, device: _C.Device, stream: _C.Stream | None, duration_ns: int) -> None:
        assert isinstance(device, _C.SimDevice)
        device.advance(self._machine.current_stream() if stream is None else stream, duration_ns)

    def allocated_bytes(self) -> int:
        return self._machine.allocated_bytes

    def peak_bytes_of(self, step: Callable[[], None]) -> int:
        self._machine.reset_peak()
        step()
        return self._machine.peak_bytes
