"""One step that is watched: counts its points and lifetimes, and informs its recorder, meter and executor.

In a session that plans, a micro-batch is a step of its own here, if all that it saved is freed before the next one.

Storages outlive the step that saved them. Once the step is over, it ignores their copies: only the end of a lifetime
still counts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch.autograd.graph import Node

from vdnn import _C
from vdnn.runtime.machine.gauges import Gauges, Mark
from vdnn.runtime.recompute.recompute_cost import RecomputeCost
from vdnn.runtime.steps.ends import Alive, StepEnds
from vdnn.runtime.steps.executor import EncodedSave, Executor
from vdnn.runtime.steps.guard import Guard
from vdnn.runtime.steps.measurement import Meter
from vdnn.runtime.steps.recorder import Recorder
from vdnn.runtime.steps.repeated_steps import ObservedStep
from vdnn.runtime.steps.save_keys import SaveKeys
from vdnn.runtime.storage.counters import Kept
from vdnn.runtime.storage.managed_storage import ManagedStorage
from vdnn.runtime.storage.packed_view import PackedShard, PackedView
from vdnn.runtime.storage.transport import Transport
from vdnn.runtime.storage.watched_lifetime import WatchedLifetime
from vdnn.runtime.torch_internals.module_watch import ModuleWatch
from vdnn.step.forms import Form
from vdnn.step.plan import Action
from vdnn.step.recording import SaveKey
from vdnn.step.timeline import Track

# The backward of a loss has its logits, their softmax and two gradients at one time, and its forward half of that.
_OF_BACKWARD = 2
# This many steps under each plan are measured, also if the session does not measure.
_CHECKED = 2


class ObservedHook:
    """The running hook of a step that is recorded or measured: it is marked, and its memory counts. One hook runs at a
    time, so all of a session share this."""

    __slots__ = (
        "_begin",
        "_changes",
        "_context",
        "_gauges",
        "_left_bytes",
        "_offloads",
        "_peaks",
        "_stream",
        "_transport",
        "most_between_bytes",
        "step",
    )

    def __init__(self, gauges: Gauges, transport: Transport) -> None:
        self.step: WatchedStep | None = None  # None: no such hook runs
        self._gauges, self._transport, self._context = gauges, transport, transport.release_context
        self._left_bytes: int | None = None  # allocated when the last hook of this step ended
        self.most_between_bytes = 0  # that operations between two hooks took besides what was allocated before

    def step_begins(self) -> None:
        self._left_bytes = None

    def begin(self, step: WatchedStep) -> None:
        gauges, context = self._gauges, self._context
        self._changes, self._offloads = context.changes, context.offloads
        step.reload_marks = None
        stream = self._stream = self._transport.current_stream()
        begin = self._begin = gauges.mark(stream)
        peaks = self._peaks = gauges.hook_begins()
        if self._left_bytes is not None:
            self._took_between(peaks.peak_bytes - self._left_bytes, step)
        if step.recorder is not None:
            step.recorder.reached(begin, peaks.with_absent_bytes, peaks.allocated_bytes)
        self.step = step

    def _took_between(self, nbytes: int, step: WatchedStep) -> None:
        """Operations between two hooks took this many bytes. The guard expects more of their backward."""
        self.most_between_bytes = max(self.most_between_bytes, nbytes)
        if step.guard is not None and step.executor is None:
            step.guard.leaves_room(nbytes if step.uses else _OF_BACKWARD * nbytes)

    @property
    def allocated_bytes(self) -> int:
        return self._gauges.allocated_in_hook(has_changed=self._context.changes != self._changes)

    @property
    def is_idle(self) -> bool:
        """True if the hook has done nothing on the device: its stream has reached nothing new since it began."""
        context = self._context
        has_issued = context.changes != self._changes or context.offloads != self._offloads
        return not (has_issued or self._gauges.has_tried) and (self.step is None or self.step.reload_marks is None)

    def end(self) -> None:
        step, gauges, stream, end = self.step, self._gauges, self._stream, self._begin
        if step is None:
            return
        has_end, self.step = gauges.reads_ends or not self.is_idle, None  # otherwise it ends where it began
        peak_bytes, _, allocated_bytes = self._peaks
        if has_end:
            end = gauges.mark(stream)
            own = gauges.hook_ends(has_changed=self._context.changes != self._changes)
            peak_bytes, allocated_bytes = max(peak_bytes, own.peak_bytes), own.allocated_bytes
        if step.recorder is not None:
            if gauges.fall_behind(stream):
                step.recorder.left(gauges.mark(stream))
            elif has_end:
                step.recorder.left(end)
        self._left_bytes = allocated_bytes
        if peak_bytes > step.peak_bytes:
            step.peak_bytes = peak_bytes
        if step.meter is not None:
            step.meter.hook(step.point, self._begin, step.reload_marks, end, allocated_bytes, peak_bytes)


class WatchedStep:
    """The state of one step. `lifetimes` is their number so far, `point` the last point."""

    def __init__(self, ends: StepEnds, *, is_later: bool = False, before: WatchedStep | None = None) -> None:
        """`is_later`: it is a micro-batch, and not the first one. `before`: the step before."""
        self.is_later = is_later
        self.uses = 0
        self.point = -1
        self.lifetimes = 0
        self.peak_bytes = 0  # allocated at one time, so far
        self.resident_bytes = 0  # allocated when it began
        self.reload_marks: tuple[Mark, Mark] | None = None  # of the running hook
        self.keys: SaveKeys = SaveKeys(is_later=is_later, before=None if before is None else before.keys)
        self.save_key: SaveKey | None = None  # of the last save
        self.save_form: Form | None = None
        self.executor: Executor | None = None
        self.guard: Guard | None = None  # of a step with a budget in bytes
        # The saves of one node, with autograd's sequence number: see StepWatch.passed_weight.
        self.weight: tuple[int, torch.Size] | None = None
        self.operand: tuple[int, torch.Size] | None = None
        self.meter: Meter | None = None
        self.recorder: Recorder | None = None
        self.observed: ObservedStep | None = None  # of a step that later ones may repeat
        self._ends_to: Recorder | None = None  # the recorder, also after the step
        self._ends = ends
        self._alive: Alive = {}

    def record(self, recorder: Recorder) -> None:
        self.recorder = self._ends_to = recorder

    def abandon_recorder(self) -> None:
        if self.recorder is not None:
            self.recorder.abandon()
            self.recorder = self._ends_to = None
        self.observed = None

    def measure_only_checks(self, executor: Executor) -> None:
        """Removes the meter, unless the step is recorded or is one of the first that follow its plan."""
        if self.recorder is None and executor.checked_steps >= _CHECKED:
            self.meter = None

    def own_peak(self, last_bytes: int, before_bytes: int) -> int:
        """The peak of the finished step. `last_bytes`: since its last measured hook, or since it began.

        torch's statistics have one peak, since the user's last reset. Over a whole step they tell the step's own peak
        only if it rose above `before_bytes` in the step. Otherwise the step counts with the memory of the checked steps
        of its plan, which it repeats."""
        executor, peak_bytes = self.executor, max(self.peak_bytes, last_bytes)
        if executor is None:
            return peak_bytes
        if self.meter is None and peak_bytes <= before_bytes:
            return min(peak_bytes, executor.checked_bytes)
        if self.meter is not None:
            executor.checked_steps += 1
            executor.checked_bytes = max(executor.checked_bytes, peak_bytes)
        return peak_bytes

    def was_refused(self) -> None:
        """Its first save was refused: the step has not begun, and another may begin in its place."""
        self.keys = SaveKeys(is_later=self.is_later, before=self.keys)
        self.save_key = self.save_form = None
        if self.recorder is not None:
            self.recorder.used_earlier_save()  # the hook is not a point

    def close(self) -> None:
        """The step is over."""
        self.recorder = self.meter = self.executor = self.guard = self.observed = None

    def lifetime_of(self, managed: ManagedStorage) -> WatchedLifetime | None:
        """The lifetime of a storage that this step saved; None for that of another step."""
        watched = managed.watched
        return watched if watched is not None and watched.observer is self else None

    def number_of(self, managed: ManagedStorage) -> int | None:
        """The number of the lifetime of a storage that this step saved; None for that of another step."""
        watched = self.lifetime_of(managed)
        return None if watched is None else watched.number

    # Points.

    def unpacked(self, packed: PackedView | PackedShard, gauges: Gauges | None) -> torch.Tensor:
        """Unpacks a save. In a hook that is measured, marks how long the use waits for its reload, if it may."""
        managed = packed.managed
        if self.meter is None or gauges is None:
            return packed.unpack()
        transport = managed.transport
        begin = gauges.mark(transport.current_stream())
        tensor = packed.unpack()
        self.reload_marks = begin, gauges.mark(transport.current_stream())
        return tensor

    @contextlib.contextmanager
    def recomputing(self, gauges: Gauges | None, transport: Transport) -> Iterator[None]:
        """A context around a recompute, which the recorder does not take for the compute of the step."""
        transport.release_context.changes += 1
        if self.recorder is None or gauges is None:
            yield
            return
        with self.recorder.recomputing(gauges.mark(transport.current_stream())):
            yield

    @property
    def key_of_first(self) -> SaveKey:
        """The key of its first save, by which the plan was chosen."""
        key = self.keys.first
        if key is None:
            raise RuntimeError("expected a step that has begun")
        return key

    def next_key(self, tensor: torch.Tensor, node: Node | None, modules: ModuleWatch) -> SaveKey:
        """The key of a save that is a point of this step."""
        key = self.save_key = self.keys.key(tensor, node, modules)
        self.save_form = self.keys.form
        return key

    def saved(self, managed: ManagedStorage, key: SaveKey, *, is_new: bool) -> Action | None:
        """Counts the save; returns the planned action, or None if no plan has the save."""
        self.point += 1
        if is_new:
            watched: WatchedLifetime | None = self.begin_planned(managed, self.lifetimes, None)
            self.lifetimes += 1
        else:
            watched = managed.watched
        if watched is None or watched.number is None:
            raise RuntimeError(f"expected a storage of a lifetime of this step, got one of none at {key}")
        if self.recorder is not None:
            self.recorder.saved(managed, watched.number, key, is_new=is_new)
        if self.observed is not None:
            watched.planned = self._observe_save(self.observed, managed, key, watched.planned)
        executor = None if self.executor is None or self.executor.is_outgrown else self.executor
        if executor is not None:
            planned = executor.saved(managed, key, self.keys.form, is_new)
            if planned is not None:
                watched.planned = planned
        action = None if watched.planned is None else self._action_of(watched.planned)
        if executor is not None and is_new and action is None and executor.recomputes_like(self.keys.form):
            action = Action.RECOMPUTE
        if is_new and self.guard is not None:
            if watched.planned is None:
                self.guard.saved_unknown(managed.nbytes, self.keys.form)
            self._guard(self.guard, watched.number, managed, action)
        return action

    @staticmethod
    def _observe_save(observed: ObservedStep, managed: ManagedStorage, key: SaveKey, lifetime: int | None) -> int:
        lifetime = observed.begins(managed.nbytes) if lifetime is None else lifetime
        observed.saved(lifetime, key)
        return lifetime

    def decided(self, managed: ManagedStorage, action: Action, reason: Kept | None = None) -> None:
        """The policy has decided about a storage. `reason`: why it stays."""
        watched = None if self.observed is None else self.lifetime_of(managed)
        if self.observed is not None and watched is not None and watched.planned is not None:
            self.observed.decided(watched.planned, action, reason)

    def kept_for(self, managed: ManagedStorage) -> Kept:
        """The reason for which the plan keeps a storage."""
        watched = self.lifetime_of(managed)
        planned = None if watched is None else watched.planned
        return Kept.PLAN if planned is None or self.executor is None else self.executor.kept_for(planned)

    def kept_natively(self, number: int, storage: torch.UntypedStorage, key: SaveKey, *, is_new: bool) -> None:
        """Counts a save that the gate keeps in a step without a plan."""
        self.point += 1
        self.lifetimes += is_new
        if self.recorder is not None:
            self.recorder.kept_natively(number, storage, key, is_new=is_new)
        if self.guard is not None and is_new:
            self.guard.saved(storage.nbytes())

    def used_natively(self, number: int) -> None:
        """Counts the use of such a save."""
        self.uses += 1
        self.point += 1
        if self.recorder is not None:
            self.recorder.used(number)

    def completed_natively(self, number: int) -> None:
        """The operation that made such a save is over."""
        if self.recorder is not None:
            self.recorder.completed(number)

    def take_over(self, managed: ManagedStorage, number: int, *, is_evictable: bool) -> None:
        """From now on `managed` has the saves of this lifetime, which the gate has kept."""
        self.begin_planned(managed, number, None)
        if self.recorder is not None:
            self.recorder.take_over(managed, number)
        if self.guard is not None:
            self.guard.is_here(number, managed.nbytes)
            if is_evictable:
                self.guard.hold_again(number, managed)

    def _guard(self, guard: Guard, number: int, managed: ManagedStorage, action: Action | None) -> None:
        guard.saved(managed.nbytes)
        if action not in (Action.RECOMPUTE, Action.COMPRESS):
            guard.is_here(number, managed.nbytes)
        if action is Action.KEEP:
            guard.hold(number, managed, Kept.PLAN)
        elif action is Action.OFFLOAD:
            guard.will_leave(number, managed)

    # The native gate has passed them, without the hooks of this step.

    def save_passed(self, key: SaveKey, nbytes: int, storage_bytes: int, *, is_new: bool) -> None:
        """A save was as planned."""
        self.point += 1
        self.lifetimes += is_new
        self.save_key = key
        if self.point > 0:  # the first one has its key
            self.keys.add(key, nbytes)
        self.save_form = self.keys.form
        if self.executor is not None:
            self.executor.pass_save(self.keys.form)
        if self.guard is not None and is_new:
            self.guard.saved(storage_bytes)

    def guard_passed(self, managed: ManagedStorage, number: int) -> None:
        """`managed` is a lifetime that Python handled."""
        if self.guard is None:
            return
        if managed.source.storage is not None and managed.action not in (Action.RECOMPUTE, Action.COMPRESS):
            self.guard.is_here(number, managed.nbytes)
        if managed.action is Action.KEEP:
            self.guard.hold(number, managed, Kept.PLAN)
        elif managed.action is Action.OFFLOAD and managed.source.storage is not None:
            self.guard.will_leave(number, managed)

    def encoded_passed(self, encoded: Sequence[EncodedSave]) -> None:
        """Encoded bytes were saved as planned."""
        for one in encoded:
            self.point += 1
            if self.executor is not None:
                self.executor.pass_save(self.keys.form_of_encoded(one.key))

    def use_passed(self, number: int | None, planned: int | None) -> None:
        """A use was as planned."""
        self.used(WatchedLifetime(self, number, planned))

    def guards(self, managed: ManagedStorage) -> bool:
        """True if the guard keeps a storage that the online policy would offload, until it has to be evicted."""
        watched = None if self.guard is None else self.lifetime_of(managed)
        if self.guard is None or watched is None or watched.number is None:
            return False
        self.guard.hold(watched.number, managed)
        return True

    def saved_encoded(self, managed: ManagedStorage, key: SaveKey) -> Action | None:
        """Counts the save of encoded bytes, which only a plan has; returns the planned action."""
        if self.observed is not None:
            self.point += 1
            self.keys.form_of_encoded(key)
            managed.watch(WatchedLifetime(self, None, self._observe_save(self.observed, managed, key, None)))
            return None
        if self.executor is None:
            return None
        self.point += 1
        planned = self.executor.saved(managed, key, self.keys.form_of_encoded(key), is_new=True)
        if planned is not None:
            managed.watch(WatchedLifetime(self, None, planned))
        return self._action_of(planned)

    def _action_of(self, planned: int | None) -> Action | None:
        return None if planned is None or self.executor is None else self.executor.plan.lifetimes[planned].action

    def used(self, watched: WatchedLifetime) -> bool:
        """Counts the use. True if a plan decides when this storage and later ones are reloaded."""
        self.uses += 1
        self.point += 1
        if self.recorder is not None and watched.number is not None:
            self.recorder.used(watched.number)
        if self.observed is not None and watched.planned is not None:
            self.observed.used(watched.planned)
        if self.executor is None:
            return False
        if watched.planned is not None:
            self.executor.used(watched.planned)
        decides = self.guard is not None and watched.number is not None and self.guard.used(watched.number)
        return decides or (watched.planned is not None and not self.executor.is_outgrown)

    def make_moves(self) -> None:
        """Issues what the plan moves at this point, and then what the guard evicts: the plan makes room by then."""
        executor, guard = self.executor, self.guard
        if guard is None:
            if executor is not None:
                executor.make_moves()
            return
        for managed in () if executor is None else executor.make_moves(guard.has_room):
            watched = self.lifetime_of(managed)
            if watched is not None and watched.number is not None:
                guard.is_gone(watched.number)
        guard.make_room()
        if guard.freed_bytes:
            freed_bytes = guard.take_freed_bytes()
            if self.recorder is not None:
                self.recorder.evicted_earlier(freed_bytes)

    # Lifetimes.

    def kept(self) -> dict[int, ManagedStorage]:
        """The lifetimes that are on the device and do not leave it."""
        alive = {number: reference() for number, reference in list(self._alive.items())}
        return {
            number: one
            for number, one in alive.items()
            if one is not None and one.action is not Action.OFFLOAD and one.source.storage is not None
        }

    def begin_planned(self, managed: ManagedStorage, number: int, planned: int | None) -> WatchedLifetime:
        """`managed` is the lifetime of this number, and of that number in the plan."""
        watched = WatchedLifetime(self, number, planned)
        managed.watch(watched)
        self._alive = self._ends.lifetime_began(number, managed)
        return watched

    def ended(self, watched: WatchedLifetime) -> None:
        if watched.number is None:
            return
        self._ends.lifetime_ended(watched.number, self._alive)
        if self.guard is not None:
            self.guard.is_gone(watched.number)
        if self._ends_to is not None:
            self._ends_to.ended(watched.number)

    def can_be_recomputed(self, lifetimes: list[int], operation: str, cost: RecomputeCost) -> None:
        """The first of these lifetimes can be recomputed from the others."""
        if self.recorder is not None:
            self.recorder.can_be_recomputed(lifetimes, operation, cost)

    def cannot_be_recomputed(self, managed: ManagedStorage) -> None:
        watched = self.lifetime_of(managed)
        if watched is not None:
            self._notify(Recorder.cannot_be_recomputed, watched)
        self.decided(managed, Action.OFFLOAD)
        if self.executor is not None:
            self.executor.not_recomputed(managed)
        if self.guard is not None and watched is not None and watched.number is not None:
            self.guard.is_here(watched.number, managed.nbytes)

    # Called when the copies of a storage change.

    def completed(self, watched: WatchedLifetime) -> None:
        if self.recorder is not None and watched.number is not None:
            self.recorder.completed(watched.number)

    def released_reload(self, watched: WatchedLifetime) -> None:
        if self.guard is not None and watched.number is not None:
            self.guard.is_gone(watched.number)
        self._notify(Recorder.released_reload, watched)

    def about_to_reload(self, watched: WatchedLifetime) -> None:
        self._notify(Recorder.about_to_reload, watched)

    def _notify(self, notice: Callable[[Recorder, int], None], watched: WatchedLifetime) -> None:
        if self.recorder is not None and watched.number is not None:
            notice(self.recorder, watched.number)

    def offloaded(self, watched: WatchedLifetime, transport: Transport, copy: _C.HostCopy) -> None:
        if self.meter is not None:
            self.meter.copied(Track.TO_HOST, _row(watched), copy.bytes, transport.queue.span(copy))

    def reloaded_ahead(self, watched: WatchedLifetime) -> None:
        if self.observed is not None and watched.planned is not None:
            self.observed.reloaded_ahead(watched.planned)

    def refused(self, watched: WatchedLifetime, nbytes: int) -> None:
        if self.guard is not None and watched.number is not None:
            self.guard.stays(watched.number, nbytes)

    def reloaded(self, watched: WatchedLifetime, reload: _C.Reload) -> None:
        if self.guard is not None and watched.number is not None:
            self.guard.came_back(watched.number, reload.bytes)
        if self.meter is not None:
            self.meter.copied(Track.TO_DEVICE, _row(watched), reload.bytes, reload.span)


def _row(watched: WatchedLifetime) -> int:
    """The number of the lifetime in a timeline: encoded bytes have that of the plan."""
    row = watched.planned if watched.number is None else watched.number
    if row is None:
        raise RuntimeError("expected a lifetime of the step or of its plan, got one of neither")
    return row
