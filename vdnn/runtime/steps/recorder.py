"""Makes the Recording of one step, while it runs under whatever policy.

What was moved is put back on paper: bytes that are on the host only because they were offloaded count as allocated,
and time that the compute stream spent waiting for copies counts for nothing. So the recording tells what the step
would have been with everything kept, also where that could not run.

[Note: Who else holds it] Giving up a storage frees it only when nobody else holds it: the model's own variables, a view
that a later layer has yet to read. While the runtime holds it too its references are counted at every point; afterwards
the end of the storage itself tells.

[Note: Parts of a storage] What is saved may be a part of a storage, such as one of the views that a product was split
into: kept, it holds all of it; given up, all of it goes, and what comes back is the part. Several lifetimes may lie in
one storage: they have one account.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from vdnn.runtime.machine.gauges import Gauges, Mark
from vdnn.runtime.recompute.recompute_cost import Proof
from vdnn.runtime.storage.managed_storage import ManagedStorage
from vdnn.runtime.storage.source_hold import HELD_ONCE
from vdnn.step.recording import Lifetime, Point, PointKind, Rebuild, Recording, SaveKey


@dataclass(slots=True)
class _Life:
    """A lifetime so far."""

    nbytes: int
    saves: list[int]
    uses: list[int] = field(default_factory=list)
    copy_point: int | None = None
    free_point: int | None = None
    end_point: int | None = None
    is_back: bool = False  # after its storage had gone
    rebuild: Rebuild | None = None
    source: _Source | None = None

    @property
    def is_shared(self) -> bool:
        """Others lie in the same storage: none of them can free it alone, and no plan shall try."""
        return self.source is not None and len(self.source.lives) > 1


@dataclass(slots=True)
class _Source:
    """A storage in which lives lie, and how much of it is put back on paper. See [Note: Parts of a storage]."""

    nbytes: int
    lives: list[_Life]
    watched: weakref.ref[torch.UntypedStorage] | None = None
    is_gone: bool = False
    absent_bytes: int = 0

    def bytes_on_paper(self) -> int:
        living = [life for life in self.lives if life.end_point is None]
        if self.is_gone:
            back_bytes = sum(life.nbytes for life in living if life.is_back)
            return max(0, self.nbytes - back_bytes) if living else 0
        # Only a copy in flight still holds it. With everything kept it would be gone.
        is_held_by_copy = not living and all(life.free_point is not None for life in self.lives)
        return -self.nbytes if is_held_by_copy else 0


@dataclass(slots=True)
class _PointSoFar:
    kind: PointKind
    lifetime: int | None
    key: SaveKey | None
    begin: Mark
    allocated_bytes: int
    peak_bytes: int
    end: Mark | None = None
    operation: tuple[str, int] | None = None  # of a use: which node of the graph asked for it


class Recorder:
    """Of one step of one device."""

    def __init__(self, gauges: Gauges, begin: Mark, parameter_bytes: int) -> None:
        self._gauges = gauges
        self._begin = begin
        self._parameter_bytes = parameter_bytes
        self._points: list[_PointSoFar] = []
        self._lives: list[_Life] = []
        self._is_rebuilding = False
        self._rebuild_mark: Mark | None = None  # where the rebuild before the next point began
        self._rebuild_peak_bytes = 0
        self._others: list[tuple[_Life, weakref.ref[ManagedStorage]]] = []
        self._resident_bytes = gauges.allocated_bytes() + gauges.absent_bytes

    # At the hooks, in order.

    def reached(self, mark: Mark, peak_bytes: int) -> None:
        """A hook has begun; what happens at it is said next. The peak is that since the last was left, nothing
        moved."""
        if self._is_rebuilding:
            self._rebuild_peak_bytes = max(self._rebuild_peak_bytes, peak_bytes)
            return
        if self._rebuild_mark is not None:  # see [Note: Rebuilds are no part of it]
            mark, self._rebuild_mark = self._rebuild_mark, None
            peak_bytes, self._rebuild_peak_bytes = self._rebuild_peak_bytes or peak_bytes, 0
        self._look_for_others()
        allocated_bytes = self._gauges.allocated_bytes() + self._gauges.absent_bytes
        self._points.append(_PointSoFar(PointKind.END, None, None, mark, allocated_bytes, peak_bytes))

    def saved(self, managed: ManagedStorage, lifetime: int, key: SaveKey, *, is_new: bool, is_aliased: bool) -> None:
        point = len(self._points) - 1
        here = self._points[point]
        here.kind, here.lifetime, here.key = PointKind.SAVE, lifetime, key
        if is_new:
            life = _Life(managed.nbytes, [])
            self._lives.append(life)
            self._follow(life, managed, is_aliased=is_aliased)
        self._lives[lifetime].saves.append(point)

    def used(self, lifetime: int) -> None:
        if self._is_rebuilding:
            return
        here = self._points[-1]
        here.kind, here.lifetime = PointKind.USE, lifetime
        node: Any = torch._C._current_autograd_node()  # None outside of a backward, whatever the stubs say
        here.operation = None if node is None else (node.name(), node._sequence_nr())
        self._lives[lifetime].uses.append(len(self._points) - 1)

    def used_another(self) -> None:
        """Something of an earlier step: no point of this one."""
        if not self._is_rebuilding:
            self._points.pop()

    def left(self, mark: Mark) -> None:
        """The hook is over."""
        if self._points and not self._is_rebuilding:
            self._points[-1].end = mark

    def completed(self, lifetime: int) -> None:
        """From this point on it may be copied."""
        life = self._lives[lifetime]
        if life.copy_point is None:
            life.copy_point = len(self._points) - 1

    @contextlib.contextmanager
    def rebuilding(self, mark: Mark) -> Iterator[None]:
        """[Note: Rebuilds are no part of it] With everything kept there are none: neither what they use nor what they
        compute belongs to the recording. The use that asked for the rebuild begins where that began."""
        if self._is_rebuilding:
            yield
            return
        self._is_rebuilding = True
        if self._rebuild_mark is None:
            self._rebuild_mark = mark  # of several in a row the first
        try:
            yield
        finally:
            self._is_rebuilding = False

    def can_be_rebuilt(self, lifetimes: Sequence[int], operation: str, proof: Proof) -> None:
        """The first of them, from the others, from now on."""
        rebuilt, *inputs = lifetimes
        point = len(self._points) - 1
        rebuild, given_up = (proof.compute_ns, proof.extra_bytes), (proof.giving_up_ns, proof.giving_up_bytes)
        self._lives[rebuilt].rebuild = Rebuild(operation, tuple(inputs), point, *rebuild, proof.kept_bytes, *given_up)

    def cannot_be_recomputed(self, lifetime: int) -> None:
        self._lives[lifetime].rebuild = None

    def about_to_reload(self, lifetime: int) -> None:
        life = self._lives[lifetime]
        life.is_back = True
        self._account(life.source)

    def gave_up_reload(self, lifetime: int) -> None:
        life = self._lives[lifetime]
        life.is_back = False
        self._account(life.source)

    # What happens to storages meanwhile.

    def _follow(self, life: _Life, managed: ManagedStorage, *, is_aliased: bool) -> None:
        storage = managed.source_storage
        if storage is None:
            return
        managed.keeps_reloaded = True
        self._others.append((life, weakref.ref(managed)))
        if is_aliased:
            for one in self._lives:
                if one.source is not None and one.source.watched is not None and one.source.watched() is storage:
                    life.source = one.source
                    one.source.lives.append(life)
                    return
        life.source = source = _Source(storage.nbytes(), [life])
        source.watched = weakref.ref(storage, functools.partial(self._storage_ended, source))

    def _storage_ended(self, source: _Source, _: object) -> None:
        """May be called anywhere, on any thread."""
        source.is_gone = True
        for life in source.lives:
            if life.end_point is None and life.free_point is None:
                life.free_point = len(self._points)
        self._account(source)

    def _account(self, source: _Source | None) -> None:
        if source is not None:
            on_paper = source.bytes_on_paper()
            self._gauges.absent_bytes += on_paper - source.absent_bytes
            source.absent_bytes = on_paper

    def ended(self, lifetime: int) -> None:
        """Its graph has let go of it."""
        life = self._lives[lifetime]
        if life.end_point is None:
            life.end_point = len(self._points)
            self._account(life.source)

    def _look_for_others(self) -> None:
        """See [Note: Who else holds it]."""
        still: list[tuple[_Life, weakref.ref[ManagedStorage]]] = []
        for life, reference in self._others:
            managed = reference()
            storage = None if managed is None else managed.source_storage
            if storage is None or life.free_point is not None:
                continue
            assert managed is not None, "its storage was asked of it"
            # Held once natively, by the wrapper; the wrapper by the managed storage, its copy's hold, and here.
            held_by_us = managed.source_references + HELD_ONCE
            if torch._C._storage_Use_Count(storage._cdata) == 1 and sys.getrefcount(storage) <= held_by_us:
                life.free_point = len(self._points)
            else:
                still.append((life, reference))
        self._others = still

    # The end.

    def finish(
        self, mark: Mark, peak_bytes: int, backend: str, device_name: str, device_bytes: int, *, has_data: bool
    ) -> Recording:
        """The step is over at `mark`. May block until the device has passed it. `has_data`: what can be recomputed was
        tried at its use, and what has none was not."""
        self.reached(mark, peak_bytes)
        for life in self._lives:
            if has_data and not life.uses:
                life.rebuild = None
        end = len(self._points) - 1
        points, before, read = [], self._begin, self._read_by()
        for point in self._points:
            compute_ns = self._gauges.ns_between(before, point.begin)
            before = point.begin if point.end is None else point.end
            sizes = point.allocated_bytes, point.peak_bytes
            operation = "" if point.operation is None else point.operation[0]
            points.append(Point(point.kind, point.lifetime, point.key, compute_ns, *sizes, operation))
        return Recording(
            backend=backend,
            device_name=device_name,
            device_bytes=device_bytes,
            torch_version=str(torch.__version__),
            clock=self._gauges.clock,
            resident_bytes=self._resident_bytes,
            parameter_bytes=self._parameter_bytes,
            points=tuple(points),
            lifetimes=tuple(_lifetime(life, end, read) for life in self._lives),
        )

    def _read_by(self) -> list[int]:
        """For every point the one at which what was used there has been read: behind the last use of its operation."""
        read = list(range(1, len(self._points) + 1))
        for index in reversed(range(len(self._points) - 1)):
            operation = self._points[index].operation
            if operation is not None and operation == self._points[index + 1].operation:
                read[index] = read[index + 1]
        return read

    def abandon(self) -> None:
        """The step will not be recorded: takes its bytes off the books."""
        for life in self._lives:
            if life.end_point is None:
                life.end_point = len(self._points)
                life.free_point = None  # of a copy in flight nobody will tell
                self._account(life.source)


def _lifetime(life: _Life, end: int, read: list[int]) -> Lifetime:
    end_point = end if life.end_point is None else life.end_point
    free_point = end if life.free_point is None else life.free_point
    return Lifetime(
        nbytes=life.nbytes,
        saves=tuple(life.saves),
        uses=tuple(life.uses),
        read=tuple(read[use] for use in life.uses),
        copy_point=life.saves[0] if life.copy_point is None else life.copy_point,
        free_point=end_point if life.is_shared else free_point,
        end_point=end_point,
        rebuild=None if life.is_shared else life.rebuild,
    )
