"""The packed view that autograd holds instead of a tensor that may move: its bytes, its storage and its geometry.

The view owns its managed storage. Unpacking restores the tensor: dtype, size, strides, offset, conjugate and negative
bits, and the layout of a DTensor over its mesh. Refuses to unpack a tensor that was modified after the save.

[Note: Shared version counters] An unpacked tensor shares the version counter of the saved tensor, as a tensor that
autograd unpacks does. If a custom backward overwrites what it unpacked, the write counts for every other view of the
bytes: their use raises the same error as in plain PyTorch.

[Note: Overlapping parts] Two parts of one storage, of which one contains the other, share memory again when they are
unpacked, as in plain PyTorch: a custom backward that writes to one must see the write in the other. A part that is
saved later joins an earlier part that contains it. A part that was saved earlier moves to a later part that contains
it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._mode_utils import no_dispatch

from vdnn._C import LightSave
from vdnn.runtime.storage.facts import Geometry
from vdnn.runtime.storage.managed_storage import ManagedStorage
from vdnn.runtime.torch_internals.version_counter import counter_of, raise_modified

# Every field of a view except the managed storage that it owns.
_OWN_FIELDS = ("_conj", "_fake_mode", "_neg", "_offset_bytes", "_witness", "geometry")


class PackedView:
    """One saved tensor. `begin`: where the managed bytes begin in the storage of `tensor`."""

    __slots__ = ("__weakref__", "_conj", "_fake_mode", "_neg", "_offset_bytes", "_witness", "geometry", "managed")

    def __init__(
        self, managed: ManagedStorage, tensor: torch.Tensor, witness: torch.Tensor, geometry: Geometry, begin: int
    ) -> None:
        self.managed = managed
        self._witness = witness
        dtype = tensor.dtype
        self._conj = dtype.is_complex and tensor.is_conj()
        self._neg = tensor.is_neg()
        self.geometry = geometry
        offset = int(tensor.storage_offset())
        self._offset_bytes = offset * tensor.itemsize - begin if offset else -begin
        self._fake_mode = tensor.fake_mode if type(tensor) is FakeTensor else None
        managed.views += 1

    @classmethod
    def of_all_bytes(cls, managed: ManagedStorage, geometry: Geometry, offset_bytes: int) -> PackedView:
        """A view that was saved while its managed storage, which is a whole storage, was light."""
        view = cls.__new__(cls)
        view.managed, view.geometry, view._offset_bytes = managed, geometry, offset_bytes
        view._witness = managed.witness
        view._conj = view._neg = False
        view._fake_mode = None
        managed.views += 1
        return view

    def unpack(self) -> torch.Tensor:
        managed, geometry = self.managed, self.geometry
        # A shared storage has one version, even if siblings have version counters of their own.
        if self._witness._version != managed.version:
            size = tuple(geometry[1])
            raise_modified(self._witness.type(), size, self._witness._version, managed.version)
        found = managed.use(geometry)
        tensor = self.view_of(*found) if isinstance(found, tuple) else found
        shared = self._witness.detach()  # see [Note: Shared version counters]
        shared.data = tensor
        return shared

    def move_to_container(self) -> None:
        """Makes this a view of a larger part that was saved later, if there is one at the same version.

        See [Note: Overlapping parts].
        """
        part, container = self.managed, self.managed.container
        if container is None or container.version != part.version:
            return
        self._offset_bytes += part.facts.begin - container.facts.begin
        part.views -= 1
        container.views += 1
        self.managed = container

    def later(self) -> Callable[[], PackedView | None]:
        """A function that makes the same view again, or returns None once its storage is freed.

        The function does not keep the storage alive.
        """
        managed = self.managed.reference
        fields = [(name, getattr(self, name)) for name in _OWN_FIELDS]

        def view() -> PackedView | None:
            owner = managed()
            if owner is None:
                return None
            copy = PackedView.__new__(PackedView)
            for name, value in fields:
                setattr(copy, name, value)
            copy.managed = owner
            owner.views += 1
            return copy

        return view

    def begin_in(self, tensor: torch.Tensor) -> int:
        """The offset of the managed bytes in the storage of `tensor`, which this view unpacked."""
        return int(tensor.storage_offset()) * tensor.itemsize - self._offset_bytes

    def view_of(self, storage: torch.UntypedStorage, begin: int) -> torch.Tensor:
        """The tensor, as a view of `storage`, which holds the managed bytes from `begin` on."""
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
            # Under create_graph grad mode is on, and these operations would call our hooks.
            with torch.no_grad():
                tensor = torch._conj(tensor) if self._conj else tensor
                tensor = torch._neg_view(tensor) if self._neg else tensor
        return tensor

    def __del__(self) -> None:
        try:
            self.managed.views -= 1
        except AttributeError:  # __init__ raised
            return


def full_view(save: LightSave) -> PackedView:
    """The packed view of a save that the native gate has moved until now."""
    view: PackedView = save.full()
    return view


class PackedShard:
    """A saved DTensor: the view of its local part, and its layout over the mesh. See [Note: Shards] in hooks.py."""

    __slots__ = ("_class", "_layout", "_version", "_witness", "view")

    def __init__(self, view: PackedView, whole: Any) -> None:
        self.view = view
        self._class = type(whole)
        self._layout = whole._spec  # immutable
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


def _elements(begin: int, dtype: torch.dtype) -> int:
    offset, rest = divmod(begin, dtype.itemsize)
    if rest:
        raise RuntimeError(f"expected a reload of {dtype} at a multiple of {dtype.itemsize} bytes, got byte {begin}")
    return offset
