"""The target of a reload: memory from torch's allocator, on the current stream, with the alignment of the original."""

from __future__ import annotations

import torch

from vdnn.runtime.storage.geometry import Geometry
from vdnn.runtime.storage.transport import Transport

# The last bit of a result of torch's CPU kernels may depend on alignment, so a reload keeps that of the original.
ALIGNMENT = 64


class ReloadTarget:
    """The memory of one reload. `tensor` owns it; the bytes begin at offset `begin` in it, which is at `address`.

    `is_whole`: `tensor` has the geometry of the saved tensor, so that a use returns it as it is.
    """

    __slots__ = ("address", "begin", "is_whole", "tensor")

    def __init__(self, tensor: torch.Tensor, address: int, begin: int, is_whole: bool) -> None:
        self.tensor = tensor
        self.address = address
        self.begin = begin
        self.is_whole = is_whole


def allocate_target(transport: Transport, nbytes: int, misalignment: int, geometry: Geometry | None) -> ReloadTarget:
    """Allocates a target for bytes whose original began `misalignment` bytes after an aligned address.

    `geometry` is that of the tensor that fills the bytes, None if there is no such tensor.
    """
    if geometry is not None and not misalignment:
        dtype, size, stride = geometry
        tensor = torch.empty_strided(size, stride, dtype=dtype, device=transport.torch_device)
        address = tensor.data_ptr()
        if not address % ALIGNMENT:
            return ReloadTarget(tensor, address, 0, True)
    # torch's allocators align to 64 bytes or more, so this is usually enough. Another allocator may need the padding.
    tensor = _allocate(transport, nbytes + misalignment)
    if not transport.fake and tensor.data_ptr() % ALIGNMENT:
        tensor = _allocate(transport, nbytes + ALIGNMENT)
    address = transport.address_of(tensor.untyped_storage())
    begin = (misalignment - address) % ALIGNMENT
    return ReloadTarget(tensor, address + begin, begin, False)


def _allocate(transport: Transport, nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device=transport.torch_device)
