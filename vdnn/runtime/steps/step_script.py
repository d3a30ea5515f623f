"""The script of a step: every save and use in order, with all that the native gate compares and all that Python needs
to continue in the middle of the step.

A lesson follows one step through the Python hooks and writes its script. Two lessons that are equal settle the step.
"""

from __future__ import annotations

import copy
import weakref
from enum import IntEnum
from typing import NamedTuple

import torch

from vdnn import _C
from vdnn.runtime.steps.ends import in_backward
from vdnn.runtime.steps.executor import Executor, PlannedMove
from vdnn.runtime.steps.recompute_lesson import EncodedSave, RecomputeLesson
from vdnn.runtime.steps.watched_step import WatchedStep
from vdnn.runtime.storage.counters import Counters, Kept
from vdnn.runtime.storage.packed_view import PackedView
from vdnn.runtime.storage.watched_lifetime import WatchedLifetime
from vdnn.runtime.torch_internals.module_watch import ModuleWatch
from vdnn.runtime.torch_internals.tensor_kinds import PLAIN_CLASSES, transform_level
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
    OPERAND = 5  # of a save that a recompute reads; a fetch for the gate


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
    module: int = 0  # the id of the innermost one; of its class, if each step makes that module anew
    module_class: int = 0  # the id of its class
    depth: int = 0  # of the running modules
    key: SaveKey | None = None
    reason: Kept | None = None  # of an exempt save
    encoded: tuple[EncodedSave, ...] = ()  # just before this event
    is_observed: bool = False  # an exempt save at which Python reads the settings of torch

    @property
    def is_save(self) -> bool:
        return self.kind <= EventKind.PLANNED

    def in_any_module(self) -> Event:
        """This event in any module of the same class."""
        return self._replace(module=self.module_class)

    def for_gate(self) -> tuple[object, ...]:
        """The fields that the gate compares, in the order in which csrc/hooks/script.cpp reads them."""
        kind = EventKind.FETCH if self.kind is EventKind.OPERAND else self.kind
        return (
            int(EventKind.PLANNED if self.is_observed else kind),
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
        )


class StepScript:
    """The script of one step that followed a plan. `allocated_bytes` were allocated at its first save."""

    def __init__(self, events: tuple[Event, ...], step: WatchedStep, allocated_bytes: int) -> None:
        self._more_bytes = allocated_bytes - step.resident_bytes  # than when it began
        self.point, self.uses, self.lifetimes = step.point, step.uses, step.lifetimes
        self.kind, self.saves, self.save_key = step.keys.kind, dict(step.keys.saves), step.save_key
        self._whole: Counters | None = None  # the counts of the whole step
        self.planned = {one.lifetime: one.planned for one in events if one.is_new}
        self._follow(events)

    def _follow(self, events: tuple[Event, ...]) -> None:
        self.events = events
        self.native = _C.Script([event.for_gate() for event in events])

    def settled_with(self, before: StepScript) -> StepScript | None:
        """The script of both steps, if they were the same. Each may have made some of its modules anew."""
        if self.events == before.events:
            return self
        mine, others = ([event.in_any_module() for event in one.events] for one in (self, before))
        if mine != others:
            return None
        pairs = zip(self.events, before.events, strict=True)
        both = copy.copy(self)
        both._follow(tuple(a if a.module == b.module else a.in_any_module() for a, b in pairs))
        return both

    def allocated_bytes(self, resident_bytes: int) -> int:
        """The bytes at the first save of such a step, if `resident_bytes` were allocated when it began."""
        return resident_bytes + self._more_bytes

    def finish(self, step: WatchedStep) -> None:
        """Makes a step that went to the end of the script what it would be now."""
        step.point, step.uses, step.lifetimes = self.point, self.uses, self.lifetimes
        step.keys.kind, step.keys.saves, step.save_key = self.kind, self.saves, self.save_key

    def replay(self, step: WatchedStep, end: int, *, has_encoded: bool = False) -> None:
        """Brings a step that the gate served from its second event to `end` to where the Python hooks would be.
        `has_encoded`: what is encoded just before `end` was."""
        executor = step.executor
        if executor is None:
            raise RuntimeError("expected a step that follows a plan, got one without")
        step.keys.rewind()
        step.point, step.uses, step.lifetimes = 0, 0, 1
        for event in self.events[1:end]:
            step.encoded_passed(event.encoded)
            if event.key is not None:
                step.save_passed(event.key, event.nbytes, event.storage_bytes, is_new=event.is_new)
                managed = executor.followed(event.planned) if event.is_new else None
                if managed is not None:
                    step.guard_passed(managed, event.lifetime)
            elif not event.is_save:
                step.use_passed(None if event.lifetime == NO_LIFETIME else event.lifetime, event.planned)
        if has_encoded and end < len(self.events):
            step.encoded_passed(self.events[end].encoded)
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
        self._modules: dict[int, weakref.ref[torch.nn.Module]] = {}  # by event
        self._recomputes = RecomputeLesson(step)
        self.has_failed = False

    def script(self) -> StepScript | None:
        """The script of the finished step; None if the step is not one that the gate can serve."""
        step, executor = self.step, self._executor
        is_whole = step.point + 1 == self._points and step.uses == self._uses
        has_acted = step.guard is not None and step.guard.has_acted
        if self.has_failed or not is_whole or has_acted or executor.differences or executor.has_grown:
            return None
        self._apart |= self._recomputes.read
        for number, module in self._modules.items():
            if module() is None:
                self._events[number] = self._events[number].in_any_module()
        for number in self._observed():
            self._events[number] = self._events[number]._replace(is_observed=True)
        return StepScript(tuple(map(self._settled, self._events)), step, self._resident_bytes)

    def _observed(self) -> set[int]:
        """Exempt saves at which the settings of torch are read. Other such saves become planned ones."""
        unseen = self._recomputes.unseen(lambda number: self._settled(self._events[number]).kind is EventKind.PLANNED)
        lifetimes = {number: self._events[number].lifetime for number in unseen}
        self._apart |= {lifetime for lifetime in lifetimes.values() if lifetime != NO_LIFETIME}
        return {number for number, lifetime in lifetimes.items() if lifetime == NO_LIFETIME}

    def _settled(self, event: Event) -> Event:
        """Turns kept saves into planned ones where something depends on them."""
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
        if event.reason is not Kept.SMALL:
            self._recomputes.saved(len(self._events))
        if self._stack:
            self._modules[len(self._events)] = weakref.ref(self._stack[-1])
        self._events.append(event)
        if self._recomputes.look() and event.lifetime != NO_LIFETIME and not event.encoded:
            self._apart.add(event.lifetime)  # it may have shown how an earlier save can be recomputed
        self._is_after_use = False
        self._kept = dict(self._counters.kept)

    def used(self, packed: object, tensor: torch.Tensor) -> None:
        if self.has_failed or isinstance(packed, tuple):
            return
        watched = packed.managed.watched if type(packed) is PackedView else None
        if watched is None or watched.observer is not self.step or watched.number is None:
            self.has_failed = True
            return
        self._add_use(EventKind.USE if self._is_kept(watched.planned) else EventKind.FETCH, watched)

    def used_operand(self, packed: object) -> None:
        """A recompute has used a save. Called by the hooks."""
        watched = packed.managed.watched if type(packed) is PackedView else None
        if watched is None or watched.observer is not self.step:
            self.has_failed = True
        elif not self.has_failed:
            self._add_use(EventKind.OPERAND, watched)

    def _add_use(self, kind: EventKind, watched: WatchedLifetime) -> None:
        encoded = self._take_encoded()
        self._points += 1
        self._uses += 1
        self._is_after_use = True
        number = NO_LIFETIME if watched.number is None else watched.number
        self._events.append(Event(kind, number, watched.planned, self._new_moves(), encoded=encoded))
        self._recomputes.look()

    def encoded(self, key: SaveKey, planned: int | None) -> None:
        """Bytes were encoded. Called by the hooks."""
        if planned is None:
            self.has_failed = True
        else:
            self._recomputes.encoded(key, planned)

    def _take_encoded(self) -> tuple[EncodedSave, ...]:
        encoded = self._recomputes.take_encoded()
        self._points += len(encoded)
        return encoded

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
        encoded = self._take_encoded()
        self._points += 1
        if managed is None or watched is None or watched.observer is not self.step or watched.number is None:
            return None
        number, planned = watched.number, watched.planned
        is_new = number not in self._begun
        self._begun.add(number)
        if is_new:
            self._recomputes.begins(managed)
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
        return event._replace(encoded=encoded)

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
            module_class=id(type(stack[-1])) if stack else 0,
            depth=len(stack),
        )

    def _is_kept(self, planned: int | None) -> bool:
        return planned is not None and self._executor.plan.lifetimes[planned].action is Action.KEEP

    def _new_moves(self) -> tuple[PlannedMove, ...]:
        moves, self._moves = self._executor.moves_since(self._moves)
        return moves
