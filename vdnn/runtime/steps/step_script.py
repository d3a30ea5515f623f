"""The script of a step: every save and use in order, with the values that the native gate compares and those that
Python needs to continue in the middle of the step. A lesson writes it."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Mapping, Sequence
from enum import IntEnum
from typing import NamedTuple

import torch

from vdnn import _C
from vdnn.runtime.steps.executor import EncodedSave, MoveKind, PlannedMove
from vdnn.runtime.steps.watched_step import WatchedStep
from vdnn.runtime.storage.counters import Counters, Kept
from vdnn.runtime.torch_internals.version_counter import empty_of
from vdnn.step.forms import Form
from vdnn.step.recording import SaveKey

NO_LIFETIME = -1


class EventKind(IntEnum):
    """The event at a position of a step. csrc/hooks/script.h has the same numbers."""

    EXEMPT = 0  # a save that is not a point: a parameter, a small tensor
    KEPT = 1  # a save that the plan keeps
    PLANNED = 2  # any other save
    USE = 3  # of a kept save
    FETCH = 4  # of any other save
    OPERAND = 5  # of a save that a recompute reads; a fetch for the gate


class Moving(NamedTuple):
    """The facts that the gate needs in order to move a save itself."""

    node_type: type  # of its producer; NoneType for a save without one
    device: torch.device
    saved_in: str | None  # the name of the class of the module: scripts outlive models
    is_dense: bool  # its bytes are all of its storage, in their order
    is_discarded: bool  # the plan recomputes its lifetime
    elements: int  # of all of its storage


class ScriptEvent(NamedTuple):
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
    form: Form | None = None  # of a save that has a key
    moving: Moving | None = None  # of a save that the gate moves
    reason: Kept | None = None  # for which it stays
    encoded: tuple[EncodedSave, ...] = ()  # just before this event
    is_read: bool = False  # Python notes this save: a recipe reads it, or needs the settings of its node

    @property
    def is_save(self) -> bool:
        return self.kind <= EventKind.PLANNED

    @property
    def is_for_python(self) -> bool:
        """True if Python is called at this save."""
        return self.kind is EventKind.PLANNED and (self.moving is None or (self.is_new and self.moving.is_discarded))

    def in_any_module(self) -> ScriptEvent:
        """This event in any module of the same class."""
        return self._replace(module=self.module_class)

    def for_gate(self, lifetimes: Mapping[int | None, int]) -> tuple[object, ...]:
        """The fields that the gate compares, in the order in which csrc/hooks/script.cpp reads them. `lifetimes`:
        lifetimes, by their numbers in the plan."""
        kind = EventKind.FETCH if self.kind is EventKind.OPERAND else self.kind
        return (
            int(kind),
            bool(self.moves),
            self.in_backward,
            self.is_leaf,
            self.is_read,
            self.lifetime,
            self.nbytes,
            self.storage_bytes,
            self.module,
            self.depth,
            self.tensor_type,
            self.dtype,
            tuple((lifetimes.get(one, NO_LIFETIME), move is MoveKind.RELOAD) for one, move in self.moves),
            self._for_mover(),
        )

    def _for_mover(self) -> tuple[object, ...] | None:
        key, moving = self.key, self.moving
        if key is None or moving is None or self.dtype is None:
            return None
        empty = empty_of(self.dtype, moving.device)
        size, stride = tuple(key.size), tuple(key.stride)
        target = (size, stride) if moving.is_dense else ((moving.elements,), (1,))
        return self.is_new, moving.is_discarded, size, stride, *target, moving.node_type, moving.device, empty, self

    @property
    def saved_in(self) -> str | None:
        return None if self.moving is None else self.moving.saved_in


class StepScript:
    """The script of one step that followed a plan. `allocated_bytes` were allocated at its first save."""

    def __init__(self, events: tuple[ScriptEvent, ...], step: WatchedStep, allocated_bytes: int) -> None:
        # More than when it began; None if that is not known.
        self._more_bytes: int | None = allocated_bytes - step.resident_bytes
        self.point, self.uses, self.lifetimes = step.point, step.uses, step.lifetimes
        self.kind, self.saves = step.keys.kind, dict(step.keys.saves)
        self.save_key, self.save_form = step.save_key, step.save_form
        self._whole: Counters | None = None  # the counts of the whole step
        self.proven: dict[int, tuple[Hashable, int]] = {}  # see SessionRecipes.proven
        self.planned = {one.lifetime: one.planned for one in events if one.is_new}
        self._follow(events)

    def _follow(self, events: tuple[ScriptEvent, ...]) -> None:
        self.events: Sequence[ScriptEvent] = events
        self.native = self.native_of(events)

    def native_of(self, events: Sequence[ScriptEvent]) -> _C.Script:
        """These events for the gate, which have the lifetimes of this script."""
        lifetimes = {planned: number for number, planned in self.planned.items()}
        return _C.Script([event.for_gate(lifetimes) for event in events])

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

    def allocated_bytes(self, resident_bytes: int) -> int | None:
        """Predicts the bytes allocated at the first save of a step that begins with `resident_bytes` allocated. None if
        no step that followed the script gives a base for that."""
        return None if self._more_bytes is None else resident_bytes + self._more_bytes

    def finish(self, step: WatchedStep) -> None:
        """Sets the counters of a step that reached the end of the script."""
        step.point, step.uses, step.lifetimes = self.point, self.uses, self.lifetimes
        step.keys.kind, step.keys.saves = self.kind, self.saves
        step.save_key, step.save_form = self.save_key, self.save_form

    def replay(self, step: WatchedStep, end: int, *, has_encoded: bool = False) -> None:
        """Moves the cursor of a step that the gate served up to `end` to where the Python hooks would have moved it.
        `has_encoded`: the saves that are encoded just before `end` are done."""
        executor = step.executor
        if executor is None:
            raise RuntimeError("expected a step that follows a plan, got one without")
        step.keys.rewind()
        step.point, step.uses, step.lifetimes = -1, 0, 0
        for event in self.events[:end]:
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
        """Adds the counts of the Python hooks that did not run for the events before `end`."""
        if end < len(self.events):
            count_events(self.events[:end], counters)
            return
        if self._whole is None:
            self._whole = self._count_whole()
        counters.add(self._whole)

    def _count_whole(self) -> Counters:
        whole = Counters()
        count_events(self.events, whole)
        return whole


def count_events(events: Sequence[ScriptEvent], counters: Counters) -> None:
    """Adds the counts of the Python hooks that did not run because the gate served these events."""
    for event in events:
        if event.kind is EventKind.USE:
            counters.uses += 1
            counters.used_in_place += 1
        if not event.is_save:
            continue
        counters.saves += 1
        counters.saved_bytes += event.nbytes
        if event.kind is EventKind.EXEMPT and event.reason is not None:
            counters.keep(event.reason, event.nbytes)
        elif event.kind is EventKind.KEPT and event.is_new and event.reason is not None:
            counters.keep(event.reason, event.storage_bytes)
        elif event.kind is EventKind.KEPT:
            counters.shared_saves += 1
