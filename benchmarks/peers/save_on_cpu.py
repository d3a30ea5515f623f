"""torch.autograd.graph.save_on_cpu, with pinned and with pageable memory; without a GPU, a model of it.

save_on_cpu copies every saved tensor, including parameters, to the host when it is saved and back when it is used, on
the compute stream, which waits for each copy. Without a GPU it would copy from CPU to CPU. There the time of its
copies is charged on the virtual machine instead, at the link's rate for pinned memory, and the result says so.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

import vdnn
from benchmarks.harness.places import MachinePlace, Place
from benchmarks.peers.peer import Moved, Opened, Peer, Trial

MODELLED = "modelled: blocking copies of every saved tensor, not torch's own code"


class SaveOnCpu(Peer):
    """save_on_cpu. Without pinned memory there are no settling steps on a GPU, because a step takes many seconds."""

    def __init__(self, name: str, *, pin_memory: bool) -> None:
        self.name = name
        self._pin_memory = pin_memory
        self.settling_steps = 1 if pin_memory else 0

    def refusal(self, place: Place, blocks: tuple[str, ...]) -> str | None:
        if isinstance(place, MachinePlace) and not self._pin_memory:
            return "no hardware profile has a rate for pageable memory, so its copies cannot be charged"
        return None

    @contextlib.contextmanager
    def open(self, trial: Trial) -> Iterator[Opened]:
        if trial.machine is None:
            with torch.autograd.graph.save_on_cpu(pin_memory=self._pin_memory):
                yield Opened()
            return
        moved = Moved()
        hooks = BlockingCopies(trial.machine, moved, has_data=trial.place.has_data)
        with torch.autograd.graph.saved_tensors_hooks(hooks.pack, hooks.unpack):
            yield Opened(moved=moved, said=MODELLED)


class HostTensor(NamedTuple):
    """The copy on the host: the content, if tensors have data, and the form of the tensor."""

    content: np.ndarray[Any, Any] | None
    shape: torch.Size
    dtype: torch.dtype
    nbytes: int


class BlockingCopies:
    """Hooks that charge a machine for save_on_cpu's copies. The device's memory is released at once, and a use gets new
    memory. As with torch's pinned copies, strides are not kept."""

    def __init__(self, machine: vdnn.VirtualMachine, moved: Moved, *, has_data: bool) -> None:
        self._machine = machine
        self._moved = moved
        self._has_data = has_data

    def pack(self, tensor: torch.Tensor) -> HostTensor:
        nbytes = tensor.numel() * tensor.element_size()
        moved, profile = self._moved, self._machine.profile
        content = None
        if self._has_data:
            with self._aside():
                content = np.array(_as_numpy(tensor.detach()), order="C")
        self._charge(nbytes, profile.to_host_bytes_per_s)
        moved.to_host_bytes += nbytes
        moved.held_bytes += nbytes
        moved.peak_held_bytes = max(moved.peak_held_bytes, moved.held_bytes)
        return HostTensor(content, tensor.shape, tensor.dtype, nbytes)

    def unpack(self, packed: HostTensor) -> torch.Tensor:
        self._charge(packed.nbytes, self._machine.profile.to_device_bytes_per_s)
        self._moved.to_device_bytes += packed.nbytes
        self._moved.held_bytes -= packed.nbytes
        with self._aside():
            tensor = torch.empty(packed.shape, dtype=packed.dtype)
            if packed.content is not None:
                _as_numpy(tensor)[...] = packed.content
            return tensor

    def _charge(self, nbytes: int, bytes_per_s: float) -> None:
        duration_ns = round(nbytes / bytes_per_s * 1e9) + self._machine.profile.link_latency_ns
        self._machine.device.advance(self._machine.current_stream(), duration_ns)
        self._moved.stall_ns += duration_ns

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        """A context in which operations take no compute time: they stand for the copy, whose time is charged."""
        self._machine.aside_ns = 0
        try:
            yield
        finally:
            self._machine.aside_ns = None


def _as_numpy(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """A NumPy array on the same memory, as int16 for bfloat16, which NumPy does not have."""
    shown = tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor
    content: np.ndarray[Any, Any] = shown.numpy()
    return content


SAVE_ON_CPU_PINNED = SaveOnCpu("save-on-cpu-pinned", pin_memory=True)
SAVE_ON_CPU_PAGEABLE = SaveOnCpu("save-on-cpu-pageable", pin_memory=False)
