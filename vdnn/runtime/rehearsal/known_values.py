"""KnownValues: the real bytes of small tensors in a rehearsal, kept beside the tensors without data.

A value is known by its storage, so views, detached tensors and parameters made of it are known too, and a write through
one of them is seen through all. Nothing here is counted as memory of the card.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch

# Large enough for token ids, positions, boxes and padding masks; small enough to compute with at no cost. Storages
# above it, such as images, weights and whole attention masks, have no values.
MOST_BYTES = 1 << 20


class KnownValues:
    """The values of storages that are alive. Call the methods below torch's dispatch modes."""

    def __init__(self) -> None:
        self._values: dict[int, tuple[weakref.ref[torch.UntypedStorage], torch.UntypedStorage]] = {}

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return self._stored(tensor) is not None

    def may_have_any(self, tensors: list[torch.Tensor]) -> bool:
        """False only if they are all unknown: the cheaper question."""
        values = self._values
        return any(one.untyped_storage()._cdata in values for one in tensors)

    def may_have_all(self, tensors: list[torch.Tensor]) -> bool:
        """False only if one of them is unknown."""
        values = self._values
        return all(one.untyped_storage()._cdata in values for one in tensors)

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """A real tensor of this geometry on the known bytes: a write to it changes what is known. None if unknown."""
        stored = self._stored(tensor)
        if stored is None:
            return None
        made = torch.empty(0, dtype=tensor.dtype)
        return made.set_(stored, tensor.storage_offset(), tensor.shape, tensor.stride())

    def learn(self, tensor: torch.Tensor, values: torch.Tensor | None = None) -> torch.Tensor | None:
        """Makes `tensor` known, with zeros if no values are given. Returns the real tensor, or None if it is too large
        or only a part of its storage."""
        if tensor.layout is not torch.strided or not _is_plain(tensor) or tensor.device.type == "meta":
            return None
        storage = tensor.untyped_storage()
        nbytes = storage.nbytes()
        if type(nbytes) is not int or nbytes > MOST_BYTES:
            return None
        if self._stored(tensor) is None:
            if tensor.numel() * tensor.itemsize != nbytes:
                return None
            key = storage._cdata
            bytes_: Any = torch.UntypedStorage(nbytes)  # type: ignore[no-untyped-call]
            bytes_.fill_(0)
            self._values[key] = (weakref.ref(storage, lambda gone: self._drop(key, gone)), bytes_)
        real = self.of(tensor)
        if real is not None and values is not None:
            real.copy_(values)
        return real

    def forget(self, tensors: Iterable[Any]) -> None:
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
                self._values.pop(tensor.untyped_storage()._cdata, None)

    def _stored(self, tensor: torch.Tensor) -> torch.UntypedStorage | None:
        if tensor.layout is not torch.strided or not _is_plain(tensor):
            return None
        storage = tensor.untyped_storage()
        found = self._values.get(storage._cdata)
        if found is None or found[0]() is not storage or found[1].nbytes() != storage.nbytes():
            return None
        return found[1]

    def _drop(self, key: int, gone: weakref.ref[torch.UntypedStorage]) -> None:
        found = self._values.get(key)
        if found is not None and found[0] is gone:
            del self._values[key]


def _is_plain(tensor: torch.Tensor) -> bool:
    return not (tensor.is_nested or tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor())
