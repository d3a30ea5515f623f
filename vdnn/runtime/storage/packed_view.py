"""What autograd holds instead of a tensor that may move: which bytes of which storage, and how they were shaped.

The view owns its managed storage. Unpacked it is the same tensor again: dtype, size, strides, offset, conjugate and
negative bits; of a DTensor its layout over the mesh too.

[Note: Shared version counters] An unpacked tensor shares the version counter of the tensor that was saved, as one that
autograd unpacks itself does. A custom backward that overwrites what it unpacked so counts for every other reader of the
bytes: their use raises what it raises in plain PyTorch.

[Note: Overlapping parts] Two parts of one storage that are saved one after the other share their memory again when they
are unpacked, as in plain PyTorch, if one contains the other: a custom backward that writes to one must see it in the
other. The later one joins a part that contains it; the earlier one moves to a later part that contains it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._mode_utils import no_dispatch

from vdnn.runtime.storage.geometry import Geometry
from vdnn.runtime.storage.managed_storage import ManagedStorage
from vdnn.runtime.torch_internals.version_counter import counter_of, raise_modified

# All that a view remembers but the storage that it owns.
_OWN_FIELDS = ("_conj", "_fake_mode", "_neg", "_offset_bytes", "_witness", "geometry")


class PackedView:
    """One saved tensor."""

    __slots__ = ("__weakref__", "_conj", "_fake_mode", "_neg", "_offset_bytes", "_witness", "geometry", "managed")

    def __init__(self, managed: ManagedStorage, tensor: torch.Tensor, witness: torch.Tensor) -> None:
        self.managed = managed
        self._witness = witness
        dtype = tensor.dtype
        self._conj = dtype.is_complex and tensor.is_conj()
        self._neg = tensor.is_neg()
        self.geometry: Geometry = (dtype, tensor.size(), tensor.stride())
        self._offset_bytes = int(tensor.storage_offset()) * tensor.itemsize - managed.begin
        self._fake_mode = tensor.fake_mode if type(tensor) is FakeTensor else None
        managed.views += 1

    def is_dense(self, tensor: torch.Tensor) -> bool:
        """Whether the managed bytes are `tensor`, whose view this is, and nothing else, if they are as many."""
        return (
            not self._offset_bytes
            and self._fake_mode is None
            and not (self._conj or self._neg)
            and (tensor.is_contiguous() or _is_channels_last(tensor))
        )

    def unpack(self) -> torch.Tensor:
        managed, geometry = self.managed, self.geometry
        # A storage that is shared has one version, also where its siblings have counters of their own.
        if self._witness._version != managed.version:
            size = tuple(geometry[1])
            raise_modified(self._witness.type(), size, self._witness._version, managed.version)
        found = managed.use(geometry)
        tensor = self.view_of(*found) if isinstance(found, tuple) else found
        if self._fake_mode is not None:
            return tensor
        shared = self._witness.detach()  # see [Note: Shared version counters]
        shared.data = tensor
        return shared

    def move_to_container(self) -> None:
        """Views a larger part of the storage that was saved after this one, if there is one.

        See [Note: Overlapping parts]. A container at another version stays away: its bytes are not these.
        """
        part = self.managed
        container = None if part.container is None else part.container()
        if container is None or container.version != part.version:
            return
        self._offset_bytes += part.begin - container.begin
        part.views -= 1
        container.views += 1
        self.managed = container

    def later(self) -> Callable[[], PackedView | None]:
        """Makes the same view again, or None once nothing holds its storage. Keeps nothing alive but this function."""
        managed = self.managed.reference
        fields = [(name, getattr(self, name)) for name in _OWN_FIELDS]

        def view() -> PackedView | None:
            owner = managed()
            if owner is None:
                return None
            made = PackedView.__new__(PackedView)
            for name, value in fields:
                setattr(made, name, value)
            made.managed = owner
            owner.views += 1
            return made

        return view

    def begin_in(self, tensor: torch.Tensor) -> int:
        """Where the managed bytes begin in the storage of `tensor`, which this view unpacked."""
        return int(tensor.storage_offset()) * tensor.itemsize - self._offset_bytes

    def view_of(self, storage: torch.UntypedStorage, begin: int) -> torch.Tensor:
        """The tensor, of a storage that holds the managed bytes from `begin` on."""
        dtype, size, stride = self.geometry
        begin += self._offset_bytes
        offset = _elements(begin, dtype) if begin else 0
        if self._fake_mode is None:
            tensor = torch.empty(0, dtype=dtype, device=storage.device)
            tensor.set_(storage, offset, size, stride)
        else:
            with no_dispatch():
                tensor = torch.empty(0, dtype=dtype, device="meta")
                tensor.set_(storage, offset, size, stride)
                tensor = FakeTensor(self._fake_mode, tensor, self.managed.transport.torch_device)
        if self._conj or self._neg:
            # Under create_graph this runs with grad mode on, and our own hooks would fire.
            with torch.no_grad():
                tensor = torch._conj(tensor) if self._conj else tensor
                tensor = torch._neg_view(tensor) if self._neg else tensor
        return tensor

    def __del__(self) -> None:
        try:
            self.managed.views -= 1
        except AttributeError:  # an exception ended its making
            return


class PackedShard:
    """A saved DTensor: the view of its part, and how the parts make up the whole. See [Note: Shards]."""

    __slots__ = ("_class", "_layout", "_version", "_witness", "view")

    def __init__(self, view: PackedView, whole: Any) -> None:
        self.view = view
        self._class = type(whole)
        self._layout = whole._spec  # a value
        self._witness = counter_of(whole)
        self._version: int = whole._version

    @property
    def managed(self) -> ManagedStorage:
        return self.view.managed

    def unpack(self) -> torch.Tensor:
        if self._witness._version != self._version:
            size = tuple(self._layout.shape)
            raise_modified(self._witness.type(), size, self._witness._version, self._version)
        whole: torch.Tensor = self._class(self.view.unpack(), self._layout, requires_grad=False)
        return whole


def _is_channels_last(tensor: torch.Tensor) -> bool:
    return tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)


def _elements(begin: int, dtype: torch.dtype) -> int:
    offset, rest = divmod(begin, dtype.itemsize)
    if rest:
        raise RuntimeError(f"a reload of {dtype} at byte {begin} is not aligned to its {dtype.itemsize} bytes")
    return offset
