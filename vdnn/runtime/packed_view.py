"""What autograd holds instead of a tensor that may move: which bytes of which storage, and how they were shaped.

The view owns its managed storage. Unpacked it is the same tensor again: dtype, size, strides, offset, conjugate and
negative bits.
"""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._mode_utils import no_dispatch

from vdnn.runtime.residency import ManagedStorage
from vdnn.runtime.version_check import raise_modified


class PackedView:
    """One saved tensor."""

    __slots__ = (
        "_conj",
        "_dtype",
        "_fake_mode",
        "_neg",
        "_offset_bytes",
        "_size",
        "_stride",
        "_witness",
        "managed",
    )

    def __init__(self, managed: ManagedStorage, tensor: torch.Tensor, witness: torch.Tensor) -> None:
        self.managed = managed
        self._witness = witness
        self._conj = tensor.is_conj()
        self._neg = tensor.is_neg()
        self._dtype = tensor.dtype
        self._size = tensor.size()
        self._stride = tensor.stride()
        self._offset_bytes = int(tensor.storage_offset()) * tensor.itemsize - managed.begin
        self._fake_mode = tensor.fake_mode if isinstance(tensor, FakeTensor) else None
        managed.views += 1

    def unpack(self) -> torch.Tensor:
        managed = self.managed
        # A storage that is shared has one version, also where its siblings have counters of their own.
        if self._witness._version != managed.version:
            raise_modified(self._witness.type(), tuple(self._size), self._witness._version, managed.version)
        storage, begin = managed.use()
        offset = _elements(begin + self._offset_bytes, self._dtype)
        if self._fake_mode is None:
            tensor = torch.empty(0, dtype=self._dtype, device=storage.device)
            tensor.set_(storage, offset, self._size, self._stride)
        else:
            with no_dispatch():
                tensor = torch.empty(0, dtype=self._dtype, device="meta")
                tensor.set_(storage, offset, self._size, self._stride)
                tensor = FakeTensor(self._fake_mode, tensor, managed.transport.torch_device)
        if self._conj or self._neg:
            # Under create_graph this runs with grad mode on, and our own hooks would fire.
            with torch.no_grad():
                tensor = torch._conj(tensor) if self._conj else tensor
                tensor = torch._neg_view(tensor) if self._neg else tensor
        return tensor

    def __del__(self) -> None:
        managed = getattr(self, "managed", None)  # an exception may have ended its making
        if managed is not None:
            managed.views -= 1


def _elements(begin: int, dtype: torch.dtype) -> int:
    offset, rest = divmod(begin, dtype.itemsize)
    if rest:
        raise RuntimeError(f"a reload of {dtype} at byte {begin} is not aligned to its {dtype.itemsize} bytes")
    return offset
