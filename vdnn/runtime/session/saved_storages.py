"""The managed storages of one session: finds the one of a saved tensor, or makes it."""

from __future__ import annotations

import torch

from vdnn.runtime.session.session_recipes import SessionRecipes
from vdnn.runtime.storage.counters import Counters
from vdnn.runtime.storage.facts import StorageFacts, is_dense
from vdnn.runtime.storage.lookahead import Lookahead
from vdnn.runtime.storage.managed_storage import ManagedStorage
from vdnn.runtime.storage.packed_view import PackedView
from vdnn.runtime.storage.table import UNSAFE_SPLIT, Table, bytes_to_manage, reach_of, split_of
from vdnn.runtime.storage.transport import Transport
from vdnn.runtime.storage.unseen_writes import joins_unseen_writes
from vdnn.runtime.torch_internals.cuda_graphs import refuse_graphs_around
from vdnn.runtime.torch_internals.module_watch import ModuleWatch
from vdnn.runtime.torch_internals.version_counter import counter_of


class SavedStorages:
    """Callers hold the packer's lock."""

    def __init__(self, modules: ModuleWatch, recipes: SessionRecipes | None, table: Table[ManagedStorage]) -> None:
        self._modules = modules
        self._recipes = recipes
        self.table = table
        self.lookahead = Lookahead()

    def manage(
        self,
        tensor: torch.Tensor,
        part: torch.Tensor,
        storage: torch.UntypedStorage,
        node: torch.autograd.graph.Node | None,
        transport: Transport,
        counters: Counters,
    ) -> tuple[PackedView, bool]:
        """The packed view of `part`, which is the tensor or its shard, and whether its bytes are newly managed."""
        whole, nbytes = storage.nbytes(), part.nbytes
        begin, managed_bytes = (0, whole) if nbytes == whole else bytes_to_manage(part, whole)
        key = (storage._cdata, begin, managed_bytes)
        counted = tensor if tensor._version else part  # see [Note: Shards] in hooks.py
        known = self.table.find(key, whole, counted)
        geometry = (part.dtype, part.size(), part.stride())
        if known is not None and self._can_join(known.found, part, known.begin):
            counters.shared_saves += 1
            return PackedView(known.found, part, known.witness, geometry, known.begin), False
        refuse_graphs_around()
        witness = counter_of(counted)
        module = self._modules.innermost()
        facts = StorageFacts(
            transport.address_of(storage) + begin,
            begin,
            managed_bytes,
            transport.current_stream(),
            geometry,
            nbytes == managed_bytes and is_dense(part),
            None if module is None else type(module),
            counters,
        )
        managed = ManagedStorage(transport, storage, facts, witness)
        if nbytes != managed_bytes:
            managed.saved_bytes = reach_of(part)
        view = PackedView(managed, part, witness, geometry, begin)
        split = split_of(part, node) if type(node).__name__ == UNSAFE_SPLIT else None
        self.table.add(key, storage, managed, split)
        self.lookahead.note(managed)
        return view, True

    def add(self, managed: ManagedStorage, storage: torch.UntypedStorage) -> None:
        """Adds a managed storage that was light until now, and has all bytes of `storage`."""
        self.table.add((storage._cdata, 0, managed.nbytes), storage, managed, None)
        self.lookahead.note(managed)

    def _can_join(self, managed: ManagedStorage, part: torch.Tensor, begin: int) -> bool:
        """False if `managed` cannot restore these bytes: see unseen_writes.py, or it keeps values of another dtype."""
        if managed.saved_bytes is not None and joins_unseen_writes(managed, managed.saved_bytes, part, begin):
            return False
        if managed.facts.geometry[0] is part.dtype:
            return True
        if managed.discarded is not None and not managed.discarded.is_exact_in_bytes:
            return False
        if self._recipes is not None and not managed.has_several_dtypes:
            self._recipes.saved_as_another_dtype(managed)
        return True

    def add_reload(self, packed: PackedView, tensor: torch.Tensor) -> None:
        """`tensor`, which was unpacked, may be saved again: see [Note: Reloads that are saved] in table.py."""
        managed, storage = packed.managed, tensor.untyped_storage()
        if storage._cdata != managed.native_address:
            self.table.add_reload(storage, managed, packed.begin_in(tensor))
