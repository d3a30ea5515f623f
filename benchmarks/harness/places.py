"""Places where the cells of a sweep run: a GPU, a simulated device, or virtual time without data.

  cuda     the current GPU: events around each step, torch's own statistics.
  sim      real tensors of a tiny size on the CPU, on a machine with a card's times: gradients are real, times virtual.
  virtual  tensors of full size without data on such a machine: times and memory are computed.

Between the two ends of a timed step, only the step runs: forward pass, loss and backward pass, without an optimizer.
Gradients are released, inputs loaded and random numbers seeded outside.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

import vdnn
from benchmarks.models.workload import Workload
from vdnn.runtime.rehearsal.cuda_shaped import CudaShaped

STEP_HAS_OPTIMIZER = False
PLACES = ("cuda", "sim", "virtual")


@dataclass(frozen=True, slots=True)
class TimedSteps:
    """A step and what runs around it: `before` and `after` are not timed."""

    before: Callable[[], None]
    step: Callable[[], None]
    after: Callable[[], None]


@dataclass(frozen=True, slots=True)
class MemoryFigures:
    """The most bytes since the last reset. None if the place has no such figure."""

    peak_bytes: int
    requested_bytes: int | None = None
    reserved_bytes: int | None = None
    pinned_bytes: int | None = None  # all bytes that torch has pinned so far


class Place(ABC):
    """A context manager. Make models inside `making()`, and run steps outside it."""

    name: str
    clock: str
    torch_device: torch.device
    vdnn_device: Any
    has_data: bool
    is_tiny: bool

    def __init__(self) -> None:
        self.entered = contextlib.ExitStack()

    def __enter__(self) -> Place:
        self.enter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.entered.__exit__(kind, error, trace)

    @abstractmethod
    def enter(self) -> None: ...

    @property
    @abstractmethod
    def device(self) -> str:
        """The name of the device."""

    @property
    @abstractmethod
    def memory_bytes(self) -> int: ...

    @abstractmethod
    def making(self) -> AbstractContextManager[object]:
        """A context in which new tensors belong to this place."""

    @abstractmethod
    def settle(self, workload: Workload) -> None:
        """Count the memory of the workload from now on. Called once, after it was made."""

    @abstractmethod
    def time_steps(self, steps: TimedSteps, count: int) -> list[int]: ...

    def tidy(self) -> None:
        """Release cached memory, if the place caches any."""
        return

    @abstractmethod
    def reset_peak(self) -> None: ...

    @abstractmethod
    def memory(self) -> MemoryFigures: ...

    def versions(self) -> dict[str, str]:
        return {}


class CudaPlace(Place):
    """The current GPU. `cuda` is torch.cuda, or a stand-in in a test."""

    name, clock = "cuda", "device"
    vdnn_device = "cuda"
    has_data, is_tiny = True, False

    def __init__(self, cuda: Any = torch.cuda) -> None:
        super().__init__()
        require_gpu(cuda)
        self._cuda = cuda
        self.torch_device = torch.device("cuda", cuda.current_device())

    def enter(self) -> None:
        pass

    @property
    def device(self) -> str:
        return str(self._cuda.get_device_name(self.torch_device))

    @property
    def memory_bytes(self) -> int:
        return int(self._cuda.get_device_properties(self.torch_device).total_memory)

    def making(self) -> AbstractContextManager[object]:
        return self.torch_device

    def settle(self, workload: Workload) -> None:
        self._cuda.synchronize()

    def time_steps(self, steps: TimedSteps, count: int) -> list[int]:
        """Time steps. The host waits before the first and after the last, and runs ahead in between, as in training."""
        events = [[self._cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
        self._cuda.synchronize()
        for begin, end in events:
            steps.before()
            begin.record()
            steps.step()
            end.record()
            steps.after()
        self._cuda.synchronize()
        return [round(begin.elapsed_time(end) * 1e6) for begin, end in events]

    def tidy(self) -> None:
        self._cuda.synchronize()
        self._cuda.empty_cache()

    def reset_peak(self) -> None:
        self._cuda.reset_peak_memory_stats()

    def memory(self) -> MemoryFigures:
        return MemoryFigures(
            int(self._cuda.max_memory_allocated()),
            int(self._cuda.memory_stats()["requested_bytes.all.peak"]),
            int(self._cuda.max_memory_reserved()),
            int(self._cuda.host_memory_stats().get("allocated_bytes.peak", 0)),
        )

    def versions(self) -> dict[str, str]:
        cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
        return {"cuda": str(torch.version.cuda), "cudnn": str(cudnn)}


class MachinePlace(Place):
    """A virtual machine of that hardware, with data of a tiny size or without data at full size."""

    clock = "virtual"

    def __init__(self, hardware: str, *, has_data: bool) -> None:
        super().__init__()
        self.name = "sim" if has_data else "virtual"
        self.has_data = self.is_tiny = has_data
        self.machine = vdnn.VirtualMachine(hardware, fake=not has_data)
        self.torch_device = torch.device("cpu")
        self.vdnn_device = self.machine

    def enter(self) -> None:
        self.entered.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)  # operations are so small that more threads only wait for each other
        self.entered.enter_context(self.machine)
        self.entered.enter_context(CudaShaped())

    @property
    def device(self) -> str:
        return str(self.machine.profile.name)

    @property
    def memory_bytes(self) -> int:
        return int(self.machine.profile.memory_bytes)

    def making(self) -> AbstractContextManager[object]:
        return contextlib.nullcontext()

    def settle(self, workload: Workload) -> None:
        self.machine.tracker.track([workload.model, workload.inputs])

    def time_steps(self, steps: TimedSteps, count: int) -> list[int]:
        times_ns = []
        for _ in range(count):
            steps.before()
            begin_ns = self.machine.now_ns
            steps.step()
            times_ns.append(self.machine.now_ns - begin_ns)
            steps.after()
        return times_ns

    def reset_peak(self) -> None:
        self.machine.reset_peak()

    def memory(self) -> MemoryFigures:
        return MemoryFigures(self.machine.peak_bytes, self.machine.peak_bytes)


def require_gpu(cuda: Any = torch.cuda) -> None:
    if not cuda.is_available():
        raise RuntimeError("place 'cuda': torch sees no GPU here. The places 'virtual' and 'sim' need none.")


def open_place(name: str, hardware: str) -> Place:
    if name == "cuda":
        return CudaPlace()
    if name in PLACES:
        return MachinePlace(hardware, has_data=name == "sim")
    raise ValueError(f"place: expected one of {', '.join(PLACES)}, got {name!r}.")
