"""The script of a step: every save and use in order, with all that the native gate compares and all that Python needs
to continue in the middle of the step.

A lesson follows one step through the Python hooks and writes its script. Two lessons that are equal settle the step.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import NamedTuple

import torch

from vdnn import _C
from vdnn.runtime.recompute.readers import may_be_overwritten
from vdnn.runtime.steps.ends import in_backward
from vdnn.runtime.steps.executor import Executor, Move, PlannedMove
from vdnn.runtime.steps.watched_step import WatchedStep
from vdnn.runtime.storage.counters import Counters, Kept
from vdnn.runtime.storage.managed_storage import ManagedStorage
from vdnn.runtime.storage.packed_view import PackedView
from vdnn.runtime.storage.table import UNSAFE_SPLIT
from vdnn.runtime.torch_internals.module_watch import ModuleWatch
from vdnn.runtime.torch_internals.tensor_kinds import CAST, PLAIN_CLASSES, transform_level
from vdnn.runtime.torch_internals.version_counter import empty_of
from vdnn.step.plan import Action
from vdnn.step.recording import SaveKey

NO_LIFETIME = -1
# A save that is kept for one of these may be managed in the next step.
_NOT_LEARNED = (Kept.SUBCLASS, Kept.PAUSED, Kept.OTHER_DEVICE, Kept.POLICY)


class EventKind(IntEnum):
    """The event at a position of a step. csrc/hooks/script.h has the same numbers."""

    EXEMPT = 0  # a save that is no point: a parameter, a small tensor
    KEPT = 1  # a save that the plan keeps and nothing depends on
    PLANNED = 2  # any other save
    USE = 3  # of a kept save
    FETCH = 4  # of any other save


class Moving(NamedTuple):
    """The facts that the gate needs in order to move a save itself."""

    node_type: type  # of its producer
    device: torch.device
    saved_in: type | None  # the class of the module


class Event(NamedTuple):
    """One save or use. The fields of a use are empty after `moves`."""

    kind: EventKind
    lifetime: int
    planned: int | None  # the lifetime in the plan
    moves: tuple[PlannedMove, ...]  # what the plan moves at this point
    is_new: bool = False  # the first save of its lifetime
    in_backward: bool = False  # the first save after a use
    tensor_type: type = torch.Tensor
    dtype: torch.dtype | None = None
    is_leaf: bool = False
    nbytes: int = 0
    storage_bytes: int = 0
    module: int = 0  # the id of the innermost one
    depth: int = 0  # of the running modules
    key: SaveKey | None = None
    moving: Moving | None = None  # of a save that the gate moves
    reason: Kept | None = None  # of an exempt save

    @property
    def is_save(self) -> bool:
        return self.kind <= EventKind.PLANNED

    def for_gate(self, lifetimes: Mapping[int | None, int]) -> tuple[object, ...]:
        """The fields that the gate compares, in the order in which csrc/hooks/script.cpp reads them. `lifetimes`: by
        their numbers in the plan."""
        return (
            int(self.kind),
            bool(self.moves),
            self.in_backward,
            self.is_leaf,
            self.lifetime,
            self.nbytes,
            self.storage_bytes,
            self.module,
            self.depth,
            self.tensor_type,
            self.dtype,
            tuple((lifetimes[one], move is Move.RELOAD) for one, move in self.moves if one in lifetimes),
            self._for_mover(),
        )

    def _for_mover(self) -> tuple[object, ...] | None:
        key, moving = self.key, self.moving
        if key is None or moving is None or self.dtype is None:
            return None
        empty = empty_of(self.dtype, moving.device)
        return self.is_new, tuple(key.size), tuple(key.stride), moving.node_type, moving.device, empty, self

    @property
    def saved_in(self) -> type | None:
        return None if self.moving is None else self.moving.saved_in


class StepScript:
    """The script of one step that followed a plan. `resident_bytes` were allocated at its first save."""

    def __init__(self, events: tuple[Event, ...], step: WatchedStep, resident_bytes: int) -> None:
        self.events = events
        self.resident_bytes = resident_bytes
        self.planned = {one.lifetime: one.planned for one in events if one.is_new}
        lifetimes = {planned: number for number, planned in self.planned.items()}
        self.native = _C.Script([event.for_gate(lifetimes) for event in events])
        self.point, self.uses, self.lifetimes = step.point, step.uses, step.lifetimes
        self.kind, self.saves, self.save_key = step.keys.kind, dict(step.keys.saves), step.save_key
        self._whole: Counters | None = None  # the counts of the whole step

    def is_like(self, other: StepScript) -> bool:
        """True if the two steps were the same."""
        return self.events == other.events

    def finish(self, step: WatchedStep) -> None:
        """Makes a step that went to the end of the script what it would be now."""
        step.point, step.uses, step.lifetimes = self.point, self.uses, self.lifetimes
        step.keys.kind, step.keys.saves, step.save_key = self.kind, self.saves, self.save_key

    def replay(self, step: WatchedStep, end: int) -> None:
        """Brings a step that the gate served from its second event to `end` to where the Python hooks would be."""
        executor = step.executor
        if executor is None:
            raise RuntimeError("expected a step that follows a plan, got one without")
        step.keys.rewind()
        step.point, step.uses, step.lifetimes = 0, 0, 1
        for event in self.events[1:end]:
            if event.key is not None:
                step.save_passed(event.key, event.nbytes, event.storage_bytes, is_new=event.is_new)
                managed = executor.followed(event.planned) if event.is_new else None
                if managed is not None:
                    step.guard_passed(managed, event.lifetime)
            elif not event.is_save:
                step.use_passed(event.lifetime, event.planned)
        executor.pass_moves()

    def count(self, counters: Counters, end: int) -> None:
        """Counts what hooks that did not run would have counted, of the events after the first and before `end`."""
        if end < len(self.events):
            self._count(counters, end)
            return
        if self._whole is None:
            self._whole = Counters()
            self._count(self._whole, end)
        counters.add(self._whole)

    def _count(self, counters: Counters, end: int) -> None:
        for event in self.events[1:end]:
            if event.kind is EventKind.USE:
                counters.uses += 1
                counters.used_in_place += 1
            if not event.is_save:
                continue
            counters.saves += 1
            counters.saved_bytes += event.nbytes
            if event.kind is EventKind.EXEMPT and event.reason is not None:
                counters.keep(event.reason, event.nbytes)
            elif event.kind is EventKind.KEPT and event.is_new:
                counters.keep(Kept.PLAN, event.storage_bytes)
            elif event.kind is EventKind.KEPT:
                counters.shared_saves += 1


class Lesson:
    """Writes the script of one step, from its first save on. The gate calls it after each hook."""

    def __init__(
        self,
        step: WatchedStep,
        executor: Executor,
        modules: ModuleWatch,
        counters: Counters,
        resident_bytes: int,
    ) -> None:
        """It begins within the first save."""
        self.step = step
        self._executor = executor
        self._stack = modules.stack()
        self._counters = counters
        self._resident_bytes = resident_bytes
        self._events: list[Event] = []
        self._points = 0
        self._uses = 0
        self._moves = 0  # of the executor, so far
        self._kept = dict(counters.kept)
        self._is_after_use = False
        self._storages: dict[int, int] = {}  # native addresses -> their first lifetime
        self._begun: set[int] = set()  # lifetimes
        self._apart: set[int] = set()  # lifetimes that Python handles, though the plan keeps them
        self._not_light: set[int] = set()  # lifetimes that the gate cannot move
        self.has_failed = False

    def script(self) -> StepScript | None:
        """The script of the finished step; None if the step is not one that the gate can serve."""
        step, executor = self.step, self._executor
        is_whole = step.point + 1 == self._points and step.uses == self._uses
        has_acted = step.guard is not None and step.guard.has_acted
        if self.has_failed or not is_whole or has_acted or executor.differences or executor.has_grown:
            return None
        events = tuple(self._settled(event) for event in self._events)
        return StepScript(events, step, self._resident_bytes)

    def _settled(self, event: Event) -> Event:
        """Turns kept saves into planned ones where something depends on them."""
        if event.lifetime in self._apart or event.lifetime in self._not_light:
            event = event._replace(moving=None)
        if event.lifetime not in self._apart:
            return event
        kinds = {EventKind.KEPT: EventKind.PLANNED, EventKind.USE: EventKind.FETCH}
        return event._replace(kind=kinds.get(event.kind, event.kind))

    # Called by the gate.

    def saved(self, tensor: torch.Tensor, packed: object) -> None:
        if self.has_failed:
            return
        event = self._exempt(tensor) if isinstance(packed, tuple) else self._point(tensor, packed)
        if event is None:
            self.has_failed = True
            return
        self._events.append(event)
        self._is_after_use = False
        self._kept = dict(self._counters.kept)

    def used(self, packed: object, tensor: torch.Tensor) -> None:
        if self.has_failed or isinstance(packed, tuple):
            return
        watched = packed.managed.watched if type(packed) is PackedView else None
        if watched is None or watched.observer is not self.step or watched.number is None:
            self.has_failed = True
            return
        self._points += 1
        self._uses += 1
        self._is_after_use = True
        if may_be_overwritten():
            self._not_light.add(watched.number)
        kind = EventKind.USE if self._is_kept(watched.planned) else EventKind.FETCH
        self._events.append(Event(kind, watched.number, watched.planned, self._new_moves()))

    def _exempt(self, tensor: torch.Tensor) -> Event | None:
        now = self._counters.kept
        reason = next((one for one in now if now[one] != self._kept.get(one, 0)), None)
        if type(tensor) not in PLAIN_CLASSES or reason is None or reason in _NOT_LEARNED:
            return None
        event = self._event(EventKind.EXEMPT, tensor, NO_LIFETIME, None, is_new=False)
        return event._replace(reason=reason, in_backward=False)

    def _point(self, tensor: torch.Tensor, packed: object) -> Event | None:
        managed = packed.managed if type(packed) is PackedView else None
        watched = None if managed is None else managed.watched
        self._points += 1
        if managed is None or watched is None or watched.observer is not self.step or watched.number is None:
            return None
        number, planned = watched.number, watched.planned
        is_new = number not in self._begun
        self._begun.add(number)
        address = managed.native_address
        if self._storages.setdefault(address, number) != number:
            self._apart |= {self._storages[address], number}  # parts or versions of one storage
        if planned is None or self.step.point + 1 != self._points or (self._is_after_use and not in_backward()):
            return None
        if transform_level() is not None or type(tensor) not in PLAIN_CLASSES:
            return None
        kind = EventKind.KEPT if self._is_kept(planned) else EventKind.PLANNED
        event = self._event(kind, tensor, number, planned, is_new=is_new)
        event = event._replace(storage_bytes=managed.nbytes, key=self.step.save_key, moves=self._new_moves())
        if kind is EventKind.PLANNED:
            event = event._replace(moving=self._moving(event, tensor, managed))
        if event.moving is None:
            self._not_light.add(number)
        return event

    def _moving(self, event: Event, tensor: torch.Tensor, managed: ManagedStorage) -> Moving | None:
        """The facts with which the gate moves this save itself; None if Python has to."""
        node, facts, key = tensor.grad_fn, managed.facts, event.key
        is_plain = type(tensor) is torch.Tensor and not tensor.dtype.is_complex and facts.is_dense
        is_part = event.is_new and event.nbytes != event.storage_bytes
        if node is None or key is None or is_part or not is_plain or managed.action is not Action.OFFLOAD:
            return None
        whole = tensor.untyped_storage().nbytes()
        if facts.begin or facts.nbytes != whole or tensor.dtype is not facts.geometry[0] or self._executor.recomputes:
            return None
        if type(node).__name__ != key.producer or key.producer in (UNSAFE_SPLIT, CAST):
            return None
        return Moving(type(node), tensor.device, facts.saved_in)

    def _event(
        self, kind: EventKind, tensor: torch.Tensor, lifetime: int, planned: int | None, *, is_new: bool
    ) -> Event:
        stack = self._stack
        return Event(
            kind,
            lifetime,
            planned,
            (),
            is_new,
            self._is_after_use,
            type(tensor),
            tensor.dtype,
            tensor.is_leaf,
            tensor.nbytes,
            module=id(stack[-1]) if stack else 0,
            depth=len(stack),
        )

    def _is_kept(self, planned: int | None) -> bool:
        return planned is not None and self._executor.plan.lifetimes[planned].action is Action.KEEP

    def _new_moves(self) -> tuple[PlannedMove, ...]:
        moves, self._moves = self._executor.moves_since(self._moves)
        return moves
