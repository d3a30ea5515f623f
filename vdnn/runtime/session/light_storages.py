"""Storages that the native gate moves or discards by itself in a settled step, and their hand-over to Python.

A light storage is one whose saves the gate can serve by itself: plain tensors that the plan offloads or recomputes. On
any trouble (another stream, an error of the device, a custom backward, a gradient of a gradient, a write, another
holder), and as soon as the gate closes, it is handed over: it becomes a managed storage, and its saves become packed
views. So there are light storages only while their step is settled, and all that is not as planned has one meaning, in
Python.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch.autograd import profiler

from vdnn import _C
from vdnn.runtime.recompute.readers import overwrites
from vdnn.runtime.session.saves import Saves
from vdnn.runtime.steps.script_sizes import EventLater, event_of
from vdnn.runtime.steps.settling import SettledStep
from vdnn.runtime.steps.step_script import ScriptEvent
from vdnn.runtime.steps.steps import StepWatch
from vdnn.runtime.storage.counters import Counters
from vdnn.runtime.storage.facts import Geometry, StorageFacts, label_of
from vdnn.runtime.storage.holders import HeldStorage
from vdnn.runtime.storage.managed_storage import ManagedStorage
from vdnn.runtime.storage.packed_view import PackedView
from vdnn.runtime.storage.reloaded import Reloaded
from vdnn.runtime.storage.source import Source
from vdnn.runtime.storage.table import reach
from vdnn.runtime.storage.transport import Transport
from vdnn.runtime.torch_internals.cuda_graphs import may_run_as_graphs
from vdnn.runtime.torch_internals.tensor_kinds import is_traced, num_dispatch_modes, transform_level
from vdnn.runtime.torch_internals.version_counter import set_versions

_Base = torch._C.TensorBase
# The counters to which the mover adds, in the order of Counts in csrc/hooks/mover.h.
_COUNTED = (
    *("storages", "storage_bytes", "shared_saves", "uses", "demand_reloads", "prefetched_reloads", "reloaded_bytes"),
    *("freed_bytes", "used_in_place", "used_recomputed", "discarded", "discarded_bytes", "recomputes"),
)
RecipeFor = Callable[[torch.Tensor, _C.LightSave, int], _C.CountedRecipe | None]
_Reload = tuple[torch.Tensor, _C.Reload, bool, int]  # the tensor, its copy, if a use has waited for it, unused views


class LightStorages:
    """The light storages of one session: its native mover, and what the mover calls."""

    def __init__(
        self, saves: Saves, watch: StepWatch, recipe_for: RecipeFor, restore: Callable[[_C.LightSave], None]
    ) -> None:
        """`recipe_for` finds the recipe of a save that is about to be discarded, at an event of the script, and
        `restore` follows it."""
        self._saves = saves
        self._watch = watch
        self.followed: SettledStep | None = None  # the step that the mover serves
        self.mover = _C.Mover(
            saves.lock.acquire,
            saves.lock.release,
            self._hand_over,
            self._make_source,
            self._held,
            self._move,
            recipe_for,
            restore,
            saves.exemptions,
            saves.exemptions.parameters.addresses,
            saves.exemptions.marked.addresses,
            saves.exemptions.modules.marked.references,
            saves.table.latest,
            overwrites,
            torch._C._current_autograd_node,
            torch.is_grad_enabled,
            transform_level,
            num_dispatch_modes,
            is_traced,
            torch._C._cuda_isCurrentStreamCapturing if torch.cuda.is_available() else None,
            _Base.shape,
            _Base.stride,
            _Base.storage_offset,
            _Base.device,
            _Base.grad_fn,
            _Base._base,
            _Base.data,
            _Base.is_neg,
            _Base.data_ptr,
            _Base.untyped_storage,
            _Base.as_strided,
            torch._C._storage_Use_Count,
            set_versions,
            torch.UntypedStorage._new_with_weak_ptr,
            torch.empty_strided,
            _Base._version,
            _Base.detach,
            _Base.requires_grad,
            torch._C._autograd._get_sequence_nr,
            ("dtype", "device"),
        )
        saves.readers.mover = self.mover

    def cut(self) -> None:
        """There are no light storages, and there will be none."""
        self._saves.readers.mover = None
        del self.mover

    # Called when the gate opens and closes.

    def begin(self, followed: SettledStep) -> None:
        """The gate will serve the rest of this step."""
        transport = self._watch.transport
        if transport is None or not _may_be_light(transport):
            return
        stream, (probe, expected) = transport.current_stream(), transport.stream_probe()
        if len(transport.streams) > 1:
            return
        self.followed = followed
        self.mover.begin(
            followed.script.native,
            transport.queue,
            transport.device,
            stream,
            probe,
            expected,
            transport.streams,
            transport.alignment,
            transport.is_checked,
            transport.release_context.notes_releases,
        )

    def end(self, counters: Counters) -> None:
        """The gate has closed. Hands over the storages that are alive, and adds the mover's counts."""
        counted = self.mover.end()
        self.followed = None
        for name, count in zip(_COUNTED, counted, strict=True):
            if count:
                setattr(counters, name, getattr(counters, name) + count)

    # Called by the mover.

    def _hand_over(
        self,
        first: ScriptEvent | EventLater,
        stored: torch.UntypedStorage | _C.WeakStorage | None,
        address: int,
        stream: _C.Stream,
        witness: torch.Tensor,
        version: int,
        copy: _C.HostCopy | None,
        reload: _Reload | None,
        saves: list[tuple[ScriptEvent | EventLater, int]],
        discarded: tuple[_C.CountedRecipe, torch.Tensor | None, int] | None,
        more_uses: int,
    ) -> tuple[list[PackedView], Source]:
        """Makes the managed storage, and a packed view for each save: an event, and its offset in elements. `stored` is
        a weak reference if the storage was released while others held it. Recomputes will use it `more_uses` times."""
        transport, event = self._watch.transport, event_of(first)
        views_of = [(event_of(save), offset) for save, offset in saves]
        if transport is None:
            raise RuntimeError("expected the transport of a light storage, got none")
        facts = self._facts(event, address, stream)
        others = stored if isinstance(stored, _C.WeakStorage) else None
        managed = ManagedStorage(transport, None if isinstance(stored, _C.WeakStorage) else stored, facts, witness)
        managed.source.others = others
        if discarded is None:
            resumed = None if reload is None else _resumed(transport, stream, facts, *reload)
            managed.resume(version, copy, resumed)
        else:
            counted, made, unused_views = discarded
            managed.resume_discarded(version, counted, None if made is None else made.untyped_storage(), unused_views)
            self._saves.readers.add(managed)
        if event.nbytes != event.storage_bytes:
            managed.saved_bytes = reach(views_of[0][1] * _itemsize(event) if views_of else 0, *_geometry(event))
        views = [
            PackedView.of_all_bytes(
                managed, facts.geometry if save is event else _geometry(save), offset * _itemsize(save)
            )
            for save, offset in views_of
        ]
        managed.views += more_uses
        if self._saves.in_forked_child:
            return views, managed.source
        self._saves.readers.forget_index()
        with self._saves.lock:
            storage = managed.source.on_device()
            if storage is not None:
                self._saves.add(managed, storage)
            self._follow(managed, event)
        return views, managed.source

    def _follow(self, managed: ManagedStorage, event: ScriptEvent) -> None:
        """From now on the step follows it in Python."""
        followed = self.followed
        if followed is None or event.planned is None:
            return
        followed.step.begin_planned(managed, event.lifetime, event.planned)
        followed.executor.follow(event.planned, managed)
        if managed.copy is None and managed.discarded is None:
            self._saves.deferred.when_complete(managed, None)  # it waited for its operation
        if managed.reloaded is not None and managed.watched is not None:
            followed.step.reloaded(managed.watched, managed.reloaded.copy)

    def _held(self, first: ScriptEvent | EventLater, storage: torch.UntypedStorage) -> _C.WeakStorage:
        """A storage is released, and others hold it."""
        transport, counters, event = self._watch.transport, self._saves.counters, event_of(first)
        if transport is None or event.key is None or event.dtype is None:
            raise RuntimeError("expected the transport and the first save of a light storage, got none")
        counters.copied_not_freed_bytes += event.storage_bytes
        label = label_of(event.dtype, event.key.size, event.saved_in)
        transport.held.append(HeldStorage(weakref.ref(storage), event.storage_bytes, label))
        return _C.WeakStorage(storage)

    def _make_source(
        self, first: ScriptEvent | EventLater, storage: torch.UntypedStorage, address: int, stream: _C.Stream
    ) -> Source:
        """The source of a storage whose graph was freed while its copy is in flight."""
        transport = self._watch.transport
        if transport is None:
            raise RuntimeError("expected the transport of a light storage, got none")
        return Source(storage, self._facts(event_of(first), address, stream), transport.release_context)

    def _move(self, first: ScriptEvent | EventLater, is_reload: bool) -> None:
        """Issues a move that the mover could not: of the lifetime of this first save, which was handed over."""
        managed = None if self.followed is None else self.followed.executor.followed(event_of(first).planned)
        if managed is None:
            return
        with self._saves.lock:
            if is_reload:
                managed.reload_early()
            else:
                managed.release()

    def _facts(self, event: ScriptEvent, address: int, stream: _C.Stream) -> StorageFacts:
        counters = self._saves.counters if self.followed is None else self.followed.counters
        geometry = _geometry(event)
        is_dense = event.moving is not None and event.moving.is_dense
        return StorageFacts(address, 0, event.storage_bytes, stream, geometry, is_dense, event.saved_in, counters)


def _may_be_light(transport: Transport) -> bool:
    """False where every copy is to be seen by Python: hashed, in a profiler's trace, or without data."""
    has_data = not transport.fake and transport.integrity is None
    return has_data and not profiler._is_profiler_enabled and not may_run_as_graphs()


def _resumed(
    transport: Transport,
    stream: _C.Stream,
    facts: StorageFacts,
    tensor: torch.Tensor,
    copy: _C.Reload,
    is_waited_for: bool,
    unused: int,
) -> Reloaded:
    return Reloaded.issued(
        transport,
        stream,
        tensor,
        copy,
        is_whole=facts.is_dense,
        is_waited_for=is_waited_for,
        unused_views=unused,
    )


def _itemsize(event: ScriptEvent) -> int:
    return 1 if event.dtype is None else event.dtype.itemsize


def _geometry(event: ScriptEvent) -> Geometry:
    if event.dtype is None:
        raise RuntimeError("expected the event of a save, got that of a use")
    if event.key is None:
        raise RuntimeError("expected a save that is a point, got another one")
    return event.dtype, torch.Size(event.key.size), event.key.stride
