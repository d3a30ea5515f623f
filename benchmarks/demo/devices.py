"""The devices of the demo: a virtual machine with real tensors on the CPU, or the GPU of this machine.

Both measure the peak and the time of each step of the loop without vdnn. A session measures its own steps.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

import vdnn
from benchmarks.harness.determinism import deterministic
from vdnn import Session, VirtualMachine

HARDWARE = "titan-x"


class Measured(NamedTuple):
    """The peak and the time of one training step."""

    peak_bytes: int
    step_ns: int


class DemoDevice(ABC):
    """One device for one training run: enter it, make the model on `torch_device`, and train."""

    cell_place: str
    clock: str
    torch_device: torch.device

    @property
    @abstractmethod
    def name(self) -> str:
        """The name of the hardware. `shown_name` says whether it is virtual."""

    @property
    def shown_name(self) -> str:
        return f"virtual {self.name}" if self.clock == "virtual" else self.name

    @abstractmethod
    def entered(self) -> contextlib.AbstractContextManager[None]:
        """Returns the context manager that the run happens inside."""

    @abstractmethod
    def session(self, budget_bytes: int) -> Session: ...

    @abstractmethod
    def begin_step(self) -> None: ...

    @abstractmethod
    def end_step(self) -> Measured:
        """Returns the peak and the time since begin_step()."""


class VirtualDevice(DemoDevice):
    """Real tensors on the CPU. The machine counts their memory and computes the time that a card would take."""

    cell_place = "virtual"
    clock = "virtual"
    torch_device = torch.device("cpu")

    def __init__(self) -> None:
        self._machine = VirtualMachine(HARDWARE, fake=False)
        self._begin_ns = 0

    @property
    def name(self) -> str:
        return HARDWARE

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        with self._machine:
            yield

    def session(self, budget_bytes: int) -> Session:
        # The saved tensors of the demo are small: the default min_bytes of 1 MiB would keep most of them.
        return vdnn.offload(budget=budget_bytes, device=self._machine, min_bytes=0)

    def begin_step(self) -> None:
        self._machine.reset_peak()
        self._begin_ns = self._machine.now_ns

    def end_step(self) -> Measured:
        return Measured(self._machine.peak_bytes, self._machine.now_ns - self._begin_ns)


class CudaDevice(DemoDevice):
    """The GPU of this machine. Torch counts the memory, and algorithms are deterministic."""

    cell_place = "cuda"
    clock = "device"

    def __init__(self) -> None:
        self.torch_device = torch.device("cuda", torch.cuda.current_device())
        self._began: Any = None

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name(self.torch_device)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        torch.cuda.empty_cache()
        with deterministic(strict=True):
            yield

    def session(self, budget_bytes: int) -> Session:
        return vdnn.offload(budget=budget_bytes)

    def begin_step(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        self._began = self._event()

    def end_step(self) -> Measured:
        ended = self._event()
        ended.synchronize()
        statistics: dict[str, Any] = torch.cuda.memory_stats_as_nested_dict(self.torch_device)
        # Requested bytes, as in sessions: the allocator rounds allocated bytes up.
        peak_bytes = int(statistics["requested_bytes"]["all"]["peak"])
        return Measured(peak_bytes, round(self._began.elapsed_time(ended) * 1e6))

    def _event(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event
