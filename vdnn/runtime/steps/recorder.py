"""Makes the Recording of one step, under any policy.

A recording describes the step as it would be with everything kept, even if that does not fit the device. Bytes that are
on the host only because they were offloaded count as allocated, and time that the compute stream waited for copies does
not count.

[Note: Other holders] Releasing a storage frees its memory only if nobody else holds the storage: the model's own
variables, or a view that a later layer has yet to read. While the runtime holds it too, the recorder counts its
references at every point. After that, the end of the storage itself tells.

[Note: Parts of a storage] A save may be a part of a storage, such as one of the views that a product was split into. As
long as it is kept, all of the storage is allocated. If it is released, all of the storage is freed, and a reload
allocates the part only. Several lifetimes may be parts of one storage: they share one account.

[Note: The log] While the step runs, a point is `_FIELDS` entries of one list, without an object of its own. Objects
that are many and live long make Python's garbage collector run often. The log is turned into points when the recording
is read.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from vdnn import _C
from vdnn.runtime.machine.gauges import Gauges, Mark
from vdnn.runtime.recompute.recompute_cost import RecomputeCost
from vdnn.runtime.storage.managed_storage import ManagedStorage
from vdnn.runtime.storage.source import HELD_ONCE
from vdnn.runtime.torch_internals.memory_holders import natively_held
from vdnn.step.recording import Lifetime, Point, PointKind, Recompute, Recording, SaveKey


@dataclass(slots=True)
class _Life:
    """A lifetime so far."""

    nbytes: int
    source: _Source | None = None
    copy_point: int | None = None
    free_point: int | None = None
    end_point: int | None = None
    freed_point: int = 0  # those two as of the end of the step
    last_point: int = 0
    is_reloaded: bool = False  # after its storage was released
    is_in_gate: bool = False  # the gate keeps its saves, and holds the storage with them
    # Its operation, the lifetimes that it reads, the point from which on it is known, and its cost.
    recompute: tuple[str, Sequence[int], int, RecomputeCost] | None = None

    @property
    def is_shared(self) -> bool:
        """True if other lifetimes are parts of the same storage. None of them can free it alone, so no plan tries."""
        return self.source is not None and len(self.source.lives) > 1


class _Source(weakref.ref[torch.UntypedStorage]):
    """A storage that lifetimes are parts of, and the bytes of it that are added. See [Note: Parts of a storage]."""

    __slots__ = ("absent_bytes", "held", "is_freed", "lives", "nbytes")

    nbytes: int
    lives: list[_Life]
    held: list[tuple[_Life, weakref.ref[ManagedStorage]]]  # those of `lives` that Python manages, and others may hold
    is_freed: bool
    absent_bytes: int

    def missing_bytes(self) -> int:
        """The bytes that would be allocated in addition with everything kept; negative if fewer would be."""
        if len(self.lives) == 1:  # nearly all: without a list
            (life,) = self.lives
            if self.is_freed and life.end_point is None:
                return max(0, self.nbytes - life.nbytes) if life.is_reloaded else self.nbytes
            return 0 if self.is_freed or life.end_point is None or life.free_point is None else -self.nbytes
        living = [life for life in self.lives if life.end_point is None]
        if self.is_freed:
            reloaded_bytes = sum(life.nbytes for life in living if life.is_reloaded)
            return max(0, self.nbytes - reloaded_bytes) if living else 0
        # Only a copy in flight still holds it. With everything kept it would be freed.
        is_held_by_copy = not living and all(life.free_point is not None for life in self.lives)
        return -self.nbytes if is_held_by_copy else 0


class _LogEntry(NamedTuple):
    """A point as the log has it. `issued_ns`: the issue time of the host when the hook began; `end_issued_ns` when it
    ended.
    `operation`: the node of the graph that made the use."""

    kind: PointKind
    lifetime: int | None
    key: SaveKey | None
    begin: Mark
    issued_ns: int
    allocated_bytes: int
    peak_bytes: int
    end: Mark | None
    end_issued_ns: int | None
    operation: tuple[str, int] | None


_FIELDS = len(_LogEntry._fields)
# The places of some fields of the last point, from the end of the log.
_KIND, _LIFETIME, _KEY, _END, _END_ISSUED, _OPERATION = -10, -9, -8, -3, -2, -1
_ALLOCATED, _PEAK = 5, 6  # from its begin
_SAVE, _USE, _NEITHER = PointKind  # an attribute look-up on an Enum class costs as much as a call


class Recorder:
    """Records one step on one device."""

    def __init__(self, gauges: Gauges, begin: Mark, parameter_bytes: int) -> None:
        self._gauges = gauges
        self._begin = begin
        self._parameter_bytes = parameter_bytes
        self._log: list[Any] = []  # see [Note: The log]
        self._point = -1  # the last one
        self._lives: list[_Life] = []
        self._is_recomputing = False
        self._recompute_mark: tuple[Mark, int] | None = None  # where the recompute before the next point began
        self._begin_issued_ns = gauges.issued_ns()
        self._recompute_peak_bytes = 0
        self._held: list[_Source] = []  # by us, and maybe by others
        self._sources: dict[int, _Source] = {}  # the last one at each native address
        self._resident_bytes = gauges.allocated_bytes() + gauges.absent_bytes
        self.native: _C.UnplannedSaves | None = None  # it keeps saves of this step

    # Called in the hooks, in this order.

    def reached(self, mark: Mark, peak_bytes: int, allocated_bytes: int) -> None:
        """Called when a hook begins, with the bytes that are allocated then. The next calls say what happens at it.
        `peak_bytes` is the keep-all peak since the previous hook."""
        if self._is_recomputing:
            self._recompute_peak_bytes = max(self._recompute_peak_bytes, peak_bytes)
            return
        issued_ns = self._gauges.issued_ns()
        if self._recompute_mark is not None:  # see [Note: Recomputes are not recorded]
            (mark, issued_ns), self._recompute_mark = self._recompute_mark, None
            peak_bytes, self._recompute_peak_bytes = self._recompute_peak_bytes or peak_bytes, 0
        if self._held:
            self._find_freed()
        if self.native is not None:
            self._ask(self.native)
        allocated_bytes += self._gauges.absent_bytes
        self._point += 1
        self._log += _NEITHER, None, None, mark, issued_ns, allocated_bytes, peak_bytes, None, None, None

    def saved(self, managed: ManagedStorage, lifetime: int, key: SaveKey, *, is_new: bool) -> None:
        log = self._log
        log[_KIND], log[_LIFETIME], log[_KEY] = _SAVE, lifetime, key
        if is_new:
            life = _Life(managed.nbytes)
            self._lives.append(life)
            self._follow(life, managed)

    def kept_natively(self, lifetime: int, storage: torch.UntypedStorage, key: SaveKey, *, is_new: bool) -> None:
        """A save that the gate keeps."""
        log = self._log
        log[_KIND], log[_LIFETIME], log[_KEY] = _SAVE, lifetime, key
        if is_new:
            life = _Life(storage.nbytes(), is_in_gate=True)
            self._lives.append(life)
            self._joined(life, storage)

    def take_over(self, managed: ManagedStorage, lifetime: int) -> None:
        """From now on `managed` has the saves of this lifetime."""
        life = self._lives[lifetime]
        life.is_in_gate = False
        self._follow(life, managed)

    def shares(self, lifetime: int, storage: torch.UntypedStorage) -> None:
        """Another lifetime of `storage`, of which the gate has kept this one, is about to be managed."""
        life = self._lives[lifetime]
        if life.source is None:
            self._add_source(storage, life)

    def _ask(self, native: _C.UnplannedSaves) -> None:
        """Asks the gate which lifetimes have ended, and which storages only it holds: see [Note: Other holders]."""
        changes = native.changes()
        if changes is not None:
            ended, unheld = changes
            for lifetime in ended:
                self.ended(lifetime)
            for lifetime in unheld:
                self._lives[lifetime].free_point = self._point + 1

    def used(self, lifetime: int) -> None:
        if self._is_recomputing:
            return
        log = self._log
        log[_KIND], log[_LIFETIME] = _USE, lifetime
        node: Any = torch._C._current_autograd_node()  # None outside a backward, contrary to the stubs
        if node is not None:
            log[_OPERATION] = node.name(), node._sequence_nr()

    def used_earlier_save(self) -> None:
        """The hook concerns a save of an earlier step. It is not a point of this step."""
        if not self._is_recomputing:
            self._point -= 1
            del self._log[-_FIELDS:]

    def left(self, mark: Mark) -> None:
        """The hook is over. Not called if the hook did nothing: it then ends where it began."""
        if self._log and not self._is_recomputing:
            self._log[_END], self._log[_END_ISSUED] = mark, self._gauges.issued_ns()

    def completed(self, lifetime: int) -> None:
        """Note that the storage may be copied from this point on."""
        life = self._lives[lifetime]
        if life.copy_point is None:
            life.copy_point = self._point

    @contextlib.contextmanager
    def recomputing(self, mark: Mark) -> Iterator[None]:
        """[Note: Recomputes are not recorded] With everything kept nothing is recomputed, so the uses and the
        computation of a recompute are not part of the recording. A use that needs a recompute begins where the
        recompute begins."""
        if self._is_recomputing:
            yield
            return
        self._is_recomputing = True
        if self._recompute_mark is None:
            self._recompute_mark = mark, self._gauges.issued_ns()  # the first of several in a row
        try:
            yield
        finally:
            self._is_recomputing = False

    def can_be_recomputed(self, lifetimes: Sequence[int], operation: str, cost: RecomputeCost) -> None:
        """Note that the first of the lifetimes can be recomputed from the others from this point on."""
        self._lives[lifetimes[0]].recompute = operation, lifetimes[1:], self._point, cost

    def cannot_be_recomputed(self, lifetime: int) -> None:
        self._lives[lifetime].recompute = None

    def about_to_reload(self, lifetime: int) -> None:
        life = self._lives[lifetime]
        life.is_reloaded = True
        self._account(life.source)

    def released_reload(self, lifetime: int) -> None:
        life = self._lives[lifetime]
        life.is_reloaded = False
        self._account(life.source)

    def evicted_earlier(self, nbytes: int) -> None:
        """Called when bytes were evicted that graphs of earlier steps held. The step is recorded as if they had left
        before it began."""
        self._resident_bytes -= nbytes
        for at in range(0, len(self._log), _FIELDS):
            self._log[at + _ALLOCATED] -= nbytes
            self._log[at + _PEAK] -= nbytes

    # Changes of storages between the hooks.

    def _follow(self, life: _Life, managed: ManagedStorage) -> None:
        storage = managed.source.storage
        if storage is None:
            return
        managed.keep_reloaded()
        source = self._joined(life, storage) or self._add_source(storage, life)
        if not source.held:
            self._held.append(source)
        source.held.append((life, managed.reference))

    def _joined(self, life: _Life, storage: torch.UntypedStorage) -> _Source | None:
        """The source of other lifetimes that have the same storage: see [Note: Parts of a storage]."""
        known = self._sources.get(storage._cdata)
        if known is None or known() is not storage:
            return None
        life.source = known
        known.lives.append(life)
        return known

    def _add_source(self, storage: torch.UntypedStorage, life: _Life) -> _Source:
        life.source = source = self._sources[storage._cdata] = _Source(storage, self._storage_ended)
        source.nbytes, source.lives, source.is_freed, source.absent_bytes = storage.nbytes(), [life], False, 0
        source.held = []
        return source

    def _storage_ended(self, source: _Source) -> None:
        """May be called anywhere, on any thread."""
        source.is_freed = True
        for life in source.lives:
            if life.is_in_gate and life.end_point is None:
                life.end_point = self._point + 1
            if life.end_point is None and life.free_point is None:
                life.free_point = self._point + 1
        self._account(source)

    def _account(self, source: _Source | None) -> None:
        if source is not None:
            missing_bytes = source.missing_bytes()
            self._gauges.absent_bytes += missing_bytes - source.absent_bytes
            source.absent_bytes = missing_bytes

    def ended(self, lifetime: int) -> None:
        """The graph has released this lifetime."""
        life = self._lives[lifetime]
        if life.end_point is None:
            life.end_point = self._point + 1
            self._account(life.source)

    def _find_freed(self) -> None:
        """Note the storages that only the runtime holds. See [Note: Other holders]. Several managed storages that have
        parts of one storage hold it more than once, so none of them can free it."""
        held, number = self._held, 0
        for source in held:
            storage = source()
            if storage is None:
                continue
            # The source of one managed storage and this frame hold the wrapper, and natively only the wrapper holds it.
            if sys.getrefcount(storage) <= 1 + HELD_ONCE and natively_held(storage._cdata) == 1:
                for life, reference in source.held:
                    managed = reference()
                    if managed is not None and managed.source.storage is storage and life.free_point is None:
                        life.free_point = self._point + 1
                source.held.clear()
            else:
                held[number] = source
                number += 1
        del held[number:]

    # The end.

    def finish(self, mark: Mark, peak_bytes: int, *, has_data: bool) -> None:
        """End the step at `mark`. `has_data`: recipes were tried at the uses, so lifetimes without a use cannot be
        recomputed."""
        self.reached(mark, peak_bytes, self._gauges.allocated_bytes())
        self.native = None
        end, kinds, lifetimes = self._point, self._log[::_FIELDS], self._log[1::_FIELDS]
        used = {lifetime for kind, lifetime in zip(kinds, lifetimes, strict=True) if kind is _USE}
        for lifetime, life in enumerate(self._lives):
            if has_data and lifetime not in used:
                life.recompute = None
            # Lifetimes that end later did not end in this step.
            life.last_point = end if life.end_point is None else life.end_point
            life.freed_point = end if life.free_point is None else life.free_point

    def _entries(self) -> list[_LogEntry]:
        log = self._log
        return [_LogEntry(*log[at : at + _FIELDS]) for at in range(0, len(log), _FIELDS)]

    def recording(self, backend: str, device_name: str, device_bytes: int) -> Recording:
        """The finished step. May block until the device has passed its end, and may be called on any thread."""
        entries = self._entries()
        points, before, read, issued_ns = [], self._begin, _read_by(entries), self._begin_issued_ns
        saves: list[list[int]] = [[] for _ in self._lives]
        uses: list[list[int]] = [[] for _ in self._lives]
        for index, entry in enumerate(entries):
            compute_ns = self._gauges.ns_between(before, entry.begin)
            before = entry.begin if entry.end is None else entry.end
            issue_ns = entry.issued_ns - issued_ns
            issued_ns = entry.issued_ns if entry.end_issued_ns is None else entry.end_issued_ns
            sizes = entry.allocated_bytes, entry.peak_bytes
            operation = "" if entry.operation is None else entry.operation[0]
            points.append(Point(entry.kind, entry.lifetime, entry.key, compute_ns, *sizes, operation, issue_ns))
            if entry.lifetime is not None:
                (saves if entry.kind is _SAVE else uses)[entry.lifetime].append(index)
        lives = zip(self._lives, saves, uses, strict=True)
        return Recording(
            backend=backend,
            device_name=device_name,
            device_bytes=device_bytes,
            torch_version=str(torch.__version__),
            clock=self._gauges.clock,
            resident_bytes=self._resident_bytes,
            parameter_bytes=self._parameter_bytes,
            points=tuple(points),
            lifetimes=tuple(_lifetime(life, saves, uses, read) for life, saves, uses in lives),
        )

    def abandon(self) -> None:
        """Stop recording, and remove the step's bytes from the account."""
        for life in self._lives:
            if life.end_point is None:
                life.end_point = self._point + 1
                life.free_point = None  # the end of a copy in flight will not be reported
                self._account(life.source)


def _read_by(entries: Sequence[_LogEntry]) -> list[int]:
    """The point at which the use at each point has been read: after the last use of the same operation."""
    read = list(range(1, len(entries) + 1))
    for index in reversed(range(len(entries) - 1)):
        operation = entries[index].operation
        if operation is not None and operation == entries[index + 1].operation:
            read[index] = read[index + 1]
    return read


def _lifetime(life: _Life, saves: Sequence[int], uses: Sequence[int], read: Sequence[int]) -> Lifetime:
    return Lifetime(
        nbytes=life.nbytes,
        saves=tuple(saves),
        uses=tuple(uses),
        read=tuple(read[use] for use in uses),
        copy_point=saves[0] if life.copy_point is None else life.copy_point,
        free_point=life.last_point if life.is_shared else life.freed_point,
        end_point=life.last_point,
        recompute=None if life.is_shared or life.recompute is None else _recompute(*life.recompute),
    )


def _recompute(operation: str, inputs: Sequence[int], point: int, cost: RecomputeCost) -> Recompute:
    recompute, discard = (cost.compute_ns, cost.extra_bytes), (cost.discard_ns, cost.discard_bytes)
    return Recompute(operation, tuple(inputs), point, *recompute, cost.kept_bytes, *discard, cost.issue_ns)
