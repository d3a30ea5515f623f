"""The lesson of a step follows it through the Python hooks and writes its script. Two equal lessons settle the step."""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections.abc import Callable

import torch

from vdnn.runtime.recompute.readers import may_be_overwritten
from vdnn.runtime.recompute.recipe import Recipe
from vdnn.runtime.steps.executor import EncodedSave, Executor, PlannedMove
from vdnn.runtime.steps.step_script import NO_LIFETIME, EventKind, Moving, ScriptEvent, StepScript
from vdnn.runtime.steps.watched_step import WatchedStep
from vdnn.runtime.storage.counters import Counters, Kept
from vdnn.runtime.storage.managed_storage import ManagedStorage
from vdnn.runtime.storage.packed_view import PackedView
from vdnn.runtime.storage.table import UNSAFE_SPLIT
from vdnn.runtime.storage.watched_lifetime import StepObserver, WatchedLifetime
from vdnn.runtime.torch_internals.backward_ends import in_backward
from vdnn.runtime.torch_internals.module_watch import ModuleWatch
from vdnn.runtime.torch_internals.tensor_kinds import CAST, PLAIN_CLASSES, transform_level
from vdnn.step.plan import Action
from vdnn.step.recording import SaveKey

_sequence_nr: Callable[[], int] = torch._C._autograd._get_sequence_nr
# A save that is kept for one of these may be managed in the next step.
_NOT_LEARNED = (Kept.SUBCLASS, Kept.PAUSED, Kept.OTHER_DEVICE, Kept.POLICY)


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
        """It begins with the first save."""
        self.step = step
        self.executor = executor
        self._running = modules
        self._counters = counters
        self._resident_bytes = resident_bytes
        self._events: list[ScriptEvent] = []
        self._points = 0
        self._uses = 0
        self._moves = 0  # of the executor, so far
        self._kept = dict(counters.kept)
        self._is_after_use = False
        self._storages: dict[int, int] = {}  # native addresses -> their first lifetime
        self._are_kept: dict[int, bool] = {}  # by lifetime that has begun: if the plan keeps it
        self._apart: set[int] = set()  # lifetimes that Python handles, though the gate could
        self._modules: dict[int, weakref.ref[torch.nn.Module]] = {}  # by event
        self._recomputes = RecomputeLesson(step)
        self._not_light: set[int] = set()  # lifetimes that the gate cannot move
        self.has_failed = False

    def script(self) -> StepScript | None:
        """The script of the finished step; None if the step is not one that the gate can serve."""
        step, executor = self.step, self.executor
        is_whole = step.point + 1 == self._points and step.uses == self._uses
        has_acted = step.guard is not None and step.guard.has_acted
        if self.has_failed or not is_whole or has_acted or executor.differences or executor.has_grown:
            return None
        read = {one for one in self._recomputes.read if one not in self._apart and self._is_native(one)}
        self._apart |= self._recomputes.read - read
        for number, module in self._modules.items():
            if module() is None:
                self._events[number] = self._events[number].in_any_module()
        for number in self._read_natively(read):
            self._events[number] = self._events[number]._replace(is_read=True)
        return StepScript(tuple(map(self._settled, self._events)), step, self._resident_bytes)

    def _is_native(self, lifetime: int) -> bool:
        """True if the gate keeps or moves the save by itself."""
        return self._are_kept[lifetime] or lifetime not in self._not_light

    def _read_natively(self, read: set[int]) -> set[int]:
        """The events of saves that the gate keeps or moves, but that Python has to note for recipes: recipes read their
        lifetimes (`read`), or the settings of torch are read at them."""
        events = self._events
        found = {number for number, event in enumerate(events) if event.is_save and event.lifetime in read}
        unseen = self._recomputes.unseen(lambda number: number in found or self._settled(events[number]).is_for_python)
        return found.union(unseen)

    def _settled(self, event: ScriptEvent) -> ScriptEvent:
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
        if event.reason is not Kept.SMALL:
            self._recomputes.saved(len(self._events))
        module = self._running.innermost()
        if module is not None:
            self._modules[len(self._events)] = weakref.ref(module)
        self._events.append(event)
        own = packed.managed if type(packed) is PackedView else None
        if self._recomputes.look(own) and event.lifetime != NO_LIFETIME and not event.encoded:
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
        """Called by the hooks when a recompute has used a save."""
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
        if may_be_overwritten():
            self._not_light.add(number)
        self._events.append(ScriptEvent(kind, number, watched.planned, self._new_moves(), encoded=encoded))
        self._recomputes.look()

    def encoded(self, key: SaveKey, planned: int | None) -> None:
        """Called by the hooks when bytes were encoded."""
        if planned is None:
            self.has_failed = True
        else:
            self._recomputes.encoded(key, planned)

    def _take_encoded(self) -> tuple[EncodedSave, ...]:
        encoded = self._recomputes.take_encoded()
        self._points += len(encoded)
        return encoded

    def _exempt(self, tensor: torch.Tensor) -> ScriptEvent | None:
        now = self._counters.kept
        reason = next((one for one in now if now[one] != self._kept.get(one, 0)), None)
        if type(tensor) not in PLAIN_CLASSES or reason is None or reason in _NOT_LEARNED:
            return None
        event = self._event(EventKind.EXEMPT, tensor, NO_LIFETIME, None, is_new=False)
        return event._replace(reason=reason, in_backward=False)

    def _point(self, tensor: torch.Tensor, packed: object) -> ScriptEvent | None:
        managed = packed.managed if type(packed) is PackedView else None
        watched = None if managed is None else managed.watched
        encoded = self._take_encoded()
        self._points += 1
        if managed is None or watched is None or watched.observer is not self.step or watched.number is None:
            return None
        number, planned = watched.number, watched.planned
        is_new = number not in self._are_kept
        self._are_kept[number] = self._is_kept(planned)
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
        key, form = self.step.save_key, self.step.keys.form
        event = event._replace(storage_bytes=managed.nbytes, key=key, form=form, moves=self._new_moves())
        if kind is EventKind.PLANNED:
            event = event._replace(moving=self._moving(event, tensor, managed))
        else:
            event = event._replace(reason=self.executor.kept_for(planned))
        if event.moving is None:
            self._not_light.add(number)
        return event._replace(encoded=encoded)

    def _moving(self, event: ScriptEvent, tensor: torch.Tensor, managed: ManagedStorage) -> Moving | None:
        """The facts that the gate needs to move this save by itself. None if Python has to move it."""
        node, facts, key = tensor.grad_fn, managed.facts, event.key
        is_plain = type(tensor) is torch.Tensor and not tensor.dtype.is_complex and not tensor.is_neg()
        is_discarded = node is not None and _is_recomputed(managed)
        if key is None or not is_plain or not (managed.action is Action.OFFLOAD or is_discarded):
            return None
        base = tensor._base
        if node is None and (tensor.requires_grad or (base is not None and base.requires_grad)):
            return None
        whole = tensor.untyped_storage().nbytes()
        if facts.begin or facts.nbytes != whole or tensor.dtype is not facts.geometry[0] or whole % tensor.itemsize:
            return None
        if node is not None and (type(node).__name__ != key.producer or key.producer in (UNSAFE_SPLIT, CAST)):
            return None
        is_dense, elements = event.is_new and facts.is_dense, whole // tensor.itemsize
        return Moving(type(node), tensor.device, facts.saved_in, is_dense, is_discarded, elements)

    def _event(
        self, kind: EventKind, tensor: torch.Tensor, lifetime: int, planned: int | None, *, is_new: bool
    ) -> ScriptEvent:
        stack = self._running.stack()
        return ScriptEvent(
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
        return planned is not None and self.executor.plan.lifetimes[planned].action is Action.KEEP

    def _new_moves(self) -> tuple[PlannedMove, ...]:
        moves, self._moves = self.executor.moves_since(self._moves)
        return moves


def _is_recomputed(managed: ManagedStorage) -> bool:
    """True if the first save of the storage was discarded at once, because an exact recipe was known."""
    discarded = managed.discarded
    if managed.action is not Action.RECOMPUTE or discarded is None or not isinstance(discarded.recipe, Recipe):
        return False
    return discarded.is_exact and discarded.recipe.geometry[0] is managed.facts.geometry[0]


class RecomputeLesson:
    """Learns about the recomputes of one step: which saves they read, and at which events bytes are encoded. Events
    have their numbers in the script.

    A recipe finds its operands through the nodes of the graph. It also has to know the settings of torch under which
    each node ran: from a save of that node, or from the saves before and after it. So all of these saves are noted in a
    settled step, and the settings are read there. A recipe is then as exact as without the gate.
    """

    def __init__(self, step: StepObserver) -> None:
        self._step = step
        self.read: set[int] = set()  # lifetimes that a recompute reads or finds
        self._discarding: list[weakref.ref[ManagedStorage]] = []  # to be discarded once that is possible
        self._encoded: list[EncodedSave] = []  # since the last event
        self._saves: list[tuple[int, int]] = []  # the sequence number of the node, and the event
        self._nodes: set[int] = set()  # of the recipes

    def encoded(self, key: SaveKey, planned: int) -> None:
        """Notes encoded bytes, which have a lifetime in the plan."""
        self._encoded.append(EncodedSave(key, planned))

    def take_encoded(self) -> tuple[EncodedSave, ...]:
        """The saves that were encoded since the last call."""
        taken = tuple(self._encoded)
        self._encoded.clear()
        return taken

    def saved(self, event: int) -> None:
        """Notes a save of the running node at which the settings of torch were read, because it is not small."""
        self._saves.append((_sequence_nr() - 1, event))

    def begins(self, managed: ManagedStorage) -> None:
        """Notes that a lifetime begins."""
        if managed.action in (Action.RECOMPUTE, Action.COMPRESS):
            self._discarding.append(managed.reference)

    def look(self, own: ManagedStorage | None = None) -> bool:
        """Notes the operands of storages that were discarded since the last call. Returns True if any of these storages
        is not `own`."""
        found = False
        for reference in self._discarding[:]:
            managed = reference()
            discarded = None if managed is None else managed.discarded
            if managed is not None and discarded is None:
                continue
            self._discarding.remove(reference)
            if discarded is not None:
                found |= managed is not own
                self._nodes.update(discarded.nodes)
                operands = [operand.managed for operand in discarded.operands]
                self.read |= self._numbers_of([one for one in operands if isinstance(one, ManagedStorage)])
        return found

    def _numbers_of(self, operands: list[ManagedStorage]) -> set[int]:
        all_watched = [one.watched for one in operands]
        return {
            one.number
            for one in all_watched
            if one is not None and one.observer is self._step and one.number is not None
        }

    def unseen(self, is_handled: Callable[[int], bool]) -> list[int]:
        """The saves at which Python has to read the settings of torch, without those that Python handles in any
        case."""
        saves = sorted(self._saves)
        found: list[int] = []
        for node in self._nodes:
            first, end = bisect_left(saves, (node, -1)), bisect_left(saves, (node + 1, -1))
            own = [event for _, event in saves[first:end]]
            around = [event for _, event in (*saves[max(0, first - 1) : first], *saves[end : end + 1])]
            if own:
                around = [] if any(map(is_handled, own)) else own[:1]
            found += [event for event in around if not is_handled(event)]
        return found
