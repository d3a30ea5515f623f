"""The fixed facts of a managed storage, for the parts that do not know the storage itself.

They hold no transport, because sources refer to them: see ReleaseContext.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

from vdnn import _C
from vdnn.runtime.storage.counters import Counters

Geometry = tuple[torch.dtype, torch.Size, tuple[int, ...]]  # dtype, size, stride


def is_dense(tensor: torch.Tensor) -> bool:
    """True if the values of `tensor` fill the bytes that it spans, and need no conversion when they are read."""
    if type(tensor) is FakeTensor or tensor.is_neg() or (tensor.dtype.is_complex and tensor.is_conj()):
        return False
    return tensor.is_contiguous() or (tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last))


class StorageFacts(NamedTuple):
    """The bytes [begin, begin + nbytes) of a storage, as they were at their first save."""

    address: int  # of the first of these bytes
    begin: int
    nbytes: int
    stream: _C.Stream  # the stream of the save
    geometry: Geometry  # of the first saved tensor
    is_dense: bool  # these bytes are exactly that tensor
    saved_in: type | None  # the class of the module whose forward was running
    counters: Counters

    @property
    def label(self) -> str:
        """The label that reports and errors use."""
        dtype, shape, _ = self.geometry
        module = "no module" if self.saved_in is None else self.saved_in.__name__
        return f"{str(dtype).removeprefix('torch.')} {[*shape]} saved in {module}"
