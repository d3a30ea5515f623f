"""The fixed facts of a managed storage, for the parts that do not know the storage itself.

They hold no transport, because sources refer to them: see ReleaseContext.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

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


def label_of(dtype: torch.dtype, shape: Iterable[int], saved_in: str | None) -> str:
    return f"{str(dtype).removeprefix('torch.')} {[*shape]} saved in {saved_in or 'no module'}"


class StorageFacts:
    """The bytes [begin, begin + nbytes) of a storage, as they were at their first save.

    `address`: the address of the first of these bytes. `stream`: that of the save. `geometry`: that of the first saved
    tensor. `is_dense`: these bytes are exactly that tensor. `saved_in`: the name of the class of the module whose
    forward was running.
    """

    # Not a frozen dataclass, which takes several times as long to make, nor a NamedTuple, which is slow to read.
    __slots__ = ("address", "begin", "counters", "geometry", "is_dense", "nbytes", "saved_in", "stream")

    def __init__(
        self,
        address: int,
        begin: int,
        nbytes: int,
        stream: _C.Stream,
        geometry: Geometry,
        is_dense: bool,
        saved_in: str | None,
        counters: Counters,
    ) -> None:
        self.address: Final = address
        self.begin: Final = begin
        self.nbytes: Final = nbytes
        self.stream: Final = stream
        self.geometry: Final = geometry
        self.is_dense: Final = is_dense
        self.saved_in: Final = saved_in
        self.counters: Final = counters

    @property
    def label(self) -> str:
        """The label that reports and errors use."""
        dtype, shape, _ = self.geometry
        return label_of(dtype, shape, self.saved_in)
