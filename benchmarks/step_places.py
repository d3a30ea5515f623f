"""Where steps run and are measured: on a GPU, or on this CPU as a virtual machine.

A place times a step, reads the peak of its memory and says what vdnn.offload is to be told. The virtual one has real
tensors, small ones, and virtual time: on it a program for a GPU is tried where there is none.
"""

from __future__ import annotations

import contextlib
import gc
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from vdnn.runtime.virtual_machine import VirtualMachine


class StepPlace(ABC):
    """Enter it, make models inside `making()`, and run their steps outside of that."""

    def __init__(self, name: str, device: torch.device, vdnn_device: str | VirtualMachine) -> None:
        self.name = name
        self.device = device
        self.vdnn_device = vdnn_device
        self._entered = contextlib.ExitStack()

    def __enter__(self) -> StepPlace:
        return self

    def __exit__(self, *exception: object) -> None:
        self._entered.close()

    @abstractmethod
    def making(self) -> AbstractContextManager[object]:
        """Tensors that are made inside are this place's. Not for steps: it would have its say in every operation."""

    @abstractmethod
    def timed_ns(self, step: Callable[[], None]) -> int:
        """Runs the step and waits until the device has done all of it."""

    @abstractmethod
    def reset_peak(self) -> None: ...

    @property
    @abstractmethod
    def peak_bytes(self) -> int:
        """The highest allocated since it was reset."""

    def tidy(self) -> None:
        """Between two ways: nothing that one left is the other's to carry."""
        gc.collect()


class CudaPlace(StepPlace):
    """The current GPU."""

    def __init__(self) -> None:
        super().__init__(torch.cuda.get_device_name(), torch.device("cuda", torch.cuda.current_device()), "cuda")

    def making(self) -> AbstractContextManager[object]:
        return self.device

    def timed_ns(self, step: Callable[[], None]) -> int:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        step()
        end.record()
        torch.cuda.synchronize()
        return round(begin.elapsed_time(end) * 1e6)

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    @property
    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated()

    def tidy(self) -> None:
        super().tidy()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        # Pinned memory that save_on_cpu left in torch's cache, up to twice the activations. The name has changed.
        for name in ("_accelerator_emptyHostCache", "_host_emptyCache"):
            empty_host_cache = getattr(torch._C, name, None)
            if empty_host_cache is not None:
                empty_host_cache()
                break


class VirtualPlace(StepPlace):
    """A machine with that hardware's times, whose tensors are real and on this CPU."""

    def __init__(self, hardware: str = "h100") -> None:
        self._machine = VirtualMachine(hardware, fake=False)
        super().__init__(f"virtual {hardware}", torch.device("cpu"), self._machine)

    def __enter__(self) -> StepPlace:
        self._entered.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)  # of what is this small, more threads only wait for each other
        self._entered.enter_context(self._machine)
        return self

    def making(self) -> AbstractContextManager[object]:
        return contextlib.nullcontext()

    def timed_ns(self, step: Callable[[], None]) -> int:
        begin_ns = self._machine.now_ns
        step()
        return self._machine.now_ns - begin_ns

    def reset_peak(self) -> None:
        self._machine.reset_peak()

    @property
    def peak_bytes(self) -> int:
        return self._machine.peak_bytes
