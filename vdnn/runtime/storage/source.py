"""The source of an offload: the original storage on the device, until its copy is complete or it is discarded.

The managed storage owns it, and the transfer queue holds it while a copy reads the bytes. The release frees the memory
only if no holder outside the runtime keeps the storage alive, and counts which of the two happened.

[Note: A source that others hold is used] A reload would put a second copy on the device. Writes that no version counter
counts (through `.data` or numpy) show, as in plain PyTorch, where the graph holds the source. A source that its owner
has shrunk is not used.

[Note: Memory of others] A storage over memory that torch did not allocate (torch.from_numpy, DLPack, a mapped file)
frees nothing: its owner goes on to read it. torch does not resize such a storage, which tells it from others.
"""

from __future__ import annotations

import sys
import weakref

import torch

from vdnn import _C
from vdnn.errors import DriverError
from vdnn.runtime.storage.counters import Kept
from vdnn.runtime.storage.facts import StorageFacts
from vdnn.runtime.storage.holders import HeldStorage
from vdnn.runtime.storage.transport import ReleaseContext, Transport
from vdnn.runtime.torch_internals.memory_holders import natively_held
from vdnn.runtime.torch_internals.spans import in_span


def _references_of_one_variable() -> int:
    """The sys.getrefcount of an object that one local variable holds: 2, or 1 from Python 3.14 on."""
    alone = object()
    return sys.getrefcount(alone)


HELD_ONCE = _references_of_one_variable()
_references_to = sys.getrefcount


class Source:
    """The bytes of a managed storage where the operation put them. `storage` is None once it is released.

    `others`: a weak reference to the storage if it was released while others may hold it. `hash`: in integrity mode,
    that of the bytes that were offloaded.
    """

    __slots__ = ("_context", "_facts", "hash", "others", "storage")

    def __init__(self, storage: torch.UntypedStorage | None, facts: StorageFacts, context: ReleaseContext) -> None:
        self.storage = storage
        self.hash: torch.Tensor | None = None
        self._facts = facts
        self._context = context
        self.others: _C.WeakStorage | None = None

    def on_device(self) -> torch.UntypedStorage | None:
        """The storage, if this object or another holder keeps it alive.

        See [Note: A source that others hold is used].
        """
        if self.storage is not None or self.others is None:
            return self.storage
        storage: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(self.others.cdata)
        if storage is None or storage.nbytes() < self._facts.begin + self._facts.nbytes:
            return None
        return storage

    @property
    def is_held_by_others(self) -> bool:
        """True if a release would free nothing: another holder keeps the storage alive."""
        storage = self.storage
        return storage is not None and (
            natively_held(storage._cdata) > 1
            or _references_to(storage) > HELD_ONCE + 1  # of this object
            or not storage.resizable()
        )

    def offload(self, transport: Transport) -> _C.HostCopy | None:
        """Issues the copy to the host, whose queue holds this until it is released. None if the copy is refused."""
        facts = self._facts
        address, nbytes, stream, counters = facts.address, facts.nbytes, facts.stream, facts.counters
        if transport.is_checked:
            transport.device.note_access(address, nbytes, _C.Access.WRITE, stream, "producer")
        try:
            if transport.integrity is not None:
                self._context.changes += 1
                self.hash = transport.integrity.hash(address, nbytes, stream)
            self._context.offloads += 1
            copy = in_span("offload", transport.queue.offload)(address, nbytes, stream, stream, self)
        except MemoryError:
            copy = None
        except DriverError:
            counters.keep(Kept.REFUSED, nbytes)
            return None
        if copy is None:
            counters.keep(Kept.HOST_FULL, nbytes)
            return None
        counters.storages += 1
        counters.storage_bytes += nbytes
        return copy

    def discard(self) -> None:
        """Releases the storage without a copy."""
        if self.storage is not None:
            self._context.changes += 1
            if self._context.streams:
                self._make_streams_wait(self._context)
            self.others = _C.WeakStorage(self.storage)
            self.storage = None

    def release(self) -> None:
        """Releases the storage. Called once its owner stream waits for the copy. Does not block."""
        storage, self.storage = self.storage, None
        if storage is None:
            return
        facts, context = self._facts, self._context
        if context.streams:
            self._make_streams_wait(context)
        if natively_held(storage._cdata) > 1 or _references_to(storage) > HELD_ONCE or not storage.resizable():
            # Another holder (the model, an optimizer, a cache, or a second save at another version, which shares the
            # Python object): the storage was copied and is not freed.
            facts.counters.copied_not_freed_bytes += facts.nbytes
            context.held.append(HeldStorage(weakref.ref(storage), facts.nbytes, facts.label))
            self.others = _C.WeakStorage(storage)
            return
        facts.counters.freed_bytes += facts.nbytes
        if context.notes_releases:
            context.device.note_access(facts.address, facts.nbytes, _C.Access.RELEASE, facts.stream, "storage released")

    @staticmethod
    def _make_streams_wait(context: ReleaseContext) -> None:
        """[Note: Who allocated it] A storage returns to the stream that allocated it, and torch does not say which
        stream that was. In plain PyTorch the graph holds it until backward. Here it returns earlier, while operations
        on any stream, and the copy, may still read it. So each stream on which a hook ran or a session was entered
        waits for the work that the others have now. The stream of the save already waits for the copy."""
        device, streams = context.device, context.streams
        if len(streams) < 2:
            return
        reached = [(stream, device.record(stream)) for stream in streams]
        for waiting in streams:
            for stream, event in reached:
                if stream != waiting:
                    device.wait(waiting, event)
