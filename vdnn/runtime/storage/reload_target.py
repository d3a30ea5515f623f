"""Where a reload goes: memory from torch's allocator, on the current stream, as aligned as the original was."""

from __future__ import annotations

import torch

from vdnn.runtime.storage.geometry import Geometry
from vdnn.runtime.storage.transport import Transport

# torch's CPU kernels may differ in the last bit by alignment, so a reload is as aligned as the original was.
ALIGNMENT = 64


class ReloadTarget:
    """`tensor` holds the memory; the bytes begin at `begin` in it, at `address`. `is_whole`: it is the tensor that was
    saved, and its use has none to make."""

    __slots__ = ("address", "begin", "is_whole", "tensor")

    def __init__(self, tensor: torch.Tensor, address: int, begin: int, is_whole: bool) -> None:
        self.tensor = tensor
        self.address = address
        self.begin = begin
        self.is_whole = is_whole


def allocate_target(transport: Transport, nbytes: int, misalignment: int, geometry: Geometry | None) -> ReloadTarget:
    """For bytes that lay `misalignment` bytes behind an aligned address; `geometry`, if they are all of one tensor."""
    if geometry is not None and not misalignment:
        dtype, size, stride = geometry
        tensor = torch.empty_strided(size, stride, dtype=dtype, device=transport.torch_device)
        address = tensor.data_ptr()
        if not address % ALIGNMENT:
            return ReloadTarget(tensor, address, 0, True)
    # Torch's allocators align to 64 bytes or more, so that this is all it takes; if one does not, there is padding.
    tensor = _allocate(transport, nbytes + misalignment)
    if not transport.fake and tensor.data_ptr() % ALIGNMENT:
        tensor = _allocate(transport, nbytes + ALIGNMENT)
    address = transport.address_of(tensor.untyped_storage())
    begin = (misalignment - address) % ALIGNMENT
    return ReloadTarget(tensor, address + begin, begin, False)


def _allocate(transport: Transport, nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device=transport.torch_device)
