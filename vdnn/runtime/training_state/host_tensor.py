"""A tensor over pinned host memory: where a tensor of an optimizer's state is between two steps.

It is an ordinary tensor on the CPU, so whoever reads, saves or copies it needs to know nothing of vdnn. `.cpu()` copies
it, as it copies the tensor of the device that it stands for (copies_to_cpu.py). It holds its memory, for as long as any
view of it lives. It is the only copy of these bytes on the host.
"""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from vdnn import _C
from vdnn.runtime.storage.source import HELD_ONCE
from vdnn.runtime.storage.transport import Transport
from vdnn.runtime.torch_internals.copies_to_cpu import stands_for_device
from vdnn.runtime.torch_internals.host_memory import as_host_memory
from vdnn.runtime.torch_internals.memory_holders import HolderCounts, value_is_held
from vdnn.runtime.torch_internals.tensor_kinds import outside_of_inference_mode


@dataclass(frozen=True, slots=True, eq=False)
class HostTensor:
    """The tensor, and its memory for the copy engine."""

    tensor: torch.Tensor
    block: _C.PinnedBlock
    transport: Transport  # whose pool the memory is from

    @property
    def nbytes(self) -> int:
        return self.block.bytes

    @property
    def is_held(self) -> bool:
        """True if anybody else holds the tensor or its memory. Asked while the tensor is not in the state."""
        return value_is_held(lambda: self.tensor, HolderCounts(0, 0, 0, has_base(self.tensor)))

    def moved_into(self, made: HostTensor) -> HostTensor:
        """The same tensor, with its bytes in the memory of `made`. Blocks."""
        if not isinstance(self.tensor, FakeTensor):
            self.tensor.set_(made.tensor.copy_(self.tensor))  # type: ignore[call-overload]
        return HostTensor(self.tensor, made.block, made.transport)

    def outlive_the_memory(self) -> None:
        """Gives the tensor memory of its own if others hold it: the pinned memory ends with the session."""
        if sys.getrefcount(self.tensor) > HELD_ONCE and not isinstance(self.tensor, FakeTensor):
            self.tensor.set_(self.tensor.clone())  # type: ignore[call-overload]


def has_base(host: torch.Tensor) -> bool:
    """True if the tensor that was made of the pinned memory holds it, too: not for one that was moved since."""
    return host._is_view() and host._base.untyped_storage()._cdata == host.untyped_storage()._cdata  # type: ignore[union-attr]


def host_tensor_for(tensor: torch.Tensor, transport: Transport) -> HostTensor:
    """A host tensor with the dtype and strides of `tensor`, whose bytes are not copied yet.

    Blocks while memory is pinned, and raises a MemoryError if it cannot be.
    """
    nbytes = tensor.untyped_storage().nbytes()
    block = transport.pool.allocate(nbytes)
    with (
        outside_of_inference_mode(),
        _disable_current_modes(),
    ):  # no count of device memory may see it, and no mode may make it a fake
        if isinstance(tensor, FakeTensor):
            with tensor.fake_mode:
                made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")
        else:
            memory = (ctypes.c_char * nbytes).from_address(block.address)
            memory.block = block  # type: ignore[attr-defined]  # torch holds `memory`, which holds the lease
            if transport.torch_device.type != "cpu":
                stands_for_device(block.address, memory)
            # A dtype of one byte: some dtypes of states, such as those of 8-bit optimizers, are not read from buffers.
            whole = torch.frombuffer(memory, dtype=torch.uint8).view(tensor.dtype)
            made = whole.as_strided(tensor.size(), tensor.stride())
    return HostTensor(as_host_memory(made), block, transport)
