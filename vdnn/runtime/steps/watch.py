"""Follows a session's steps: finds where each begins and ends, and informs the recorder, the meter and the executor.

A step ends with session.step(), otherwise as ends.py decides. A step without saves is not counted.

The first step after the warm-up is recorded. With a planner, so is one step of every further kind: see plan_book.py.
Every step after the warm-up is measured. Only the first of several devices is watched.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator

import torch

from vdnn import _C
from vdnn.runtime.machine.gauges import Gauges, Mark
from vdnn.runtime.recompute.recompute_cost import RecomputeCost
from vdnn.runtime.steps.ends import Alive, Found, StepEnds
from vdnn.runtime.steps.executor import Executor
from vdnn.runtime.steps.meter import Meter
from vdnn.runtime.steps.options import StepOptions
from vdnn.runtime.steps.plan_book import PlanBook
from vdnn.runtime.steps.recorder import Recorder
from vdnn.runtime.steps.save_keys import SaveKeys
from vdnn.runtime.storage.managed_storage import ManagedStorage
from vdnn.runtime.storage.transport import Transport
from vdnn.runtime.torch_internals.module_watch import ModuleWatch
from vdnn.step.plan import Action, Plan
from vdnn.step.recording import Recording, SaveKey
from vdnn.step.timeline import Timeline, Track


class StepWatch:
    """Follows the steps of one session."""

    def __init__(self, options: StepOptions, modules: ModuleWatch, on_step_end: Callable[[], None]) -> None:
        self.options = options
        self._on_step_end = on_step_end
        self._modules = modules
        self._plans = PlanBook(options.plan, options.planner)
        self.steps = 0  # the number of finished steps
        self.recording: Recording | None = None
        self._meter_of_last_step: Meter | None = None
        self._timeline: Timeline | None = None
        self._transport: Transport | None = None
        self.gauges: Gauges | None = None
        self._ends = StepEnds()
        self._living = 0  # the number of live lifetimes, of this step and of earlier ones
        self._thread = threading.local()
        self._busy = False
        self._epoch = 0  # distinguishes the lifetimes of one step from those of another
        self._clear()

    def _clear(self) -> None:
        self._uses = 0
        self._point = -1
        self._lifetimes = 0
        self._keys = SaveKeys()
        self.place: SaveKey | None = None  # the key of the last save
        self._executor: Executor | None = None
        self._recorder: Recorder | None = None
        self._meter: Meter | None = None
        self._planned: dict[int, int] = {}  # lifetime of this step -> lifetime of the plan
        self._epoch += 1

    # Results.

    @property
    def plan(self) -> Plan | None:
        return self._plans.latest if self._executor is None else self._executor.plan

    @property
    def first_difference(self) -> str | None:
        return self._plans.first_difference

    @property
    def timeline(self) -> Timeline | None:
        """The timeline of the last measured step. May block until the device has passed the step's end."""
        if self._meter_of_last_step is not None:
            self._timeline = self._meter_of_last_step.timeline()
            self._meter_of_last_step = None
        return self._timeline

    # Steps.

    def optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        found = self._ends.optimizer_stepped(id(optimizer), self._lifetimes)
        if found is Found.WERE_JOINED or (found is Found.WERE_CUT and self.steps):
            self._abandon_recorder()
        if found is Found.WERE_CUT and self.steps:
            self.steps, self.recording = 0, None
            self._plans.forget_made()
        if self._ends.is_due():
            self.end_step()

    def end_step(self) -> None:
        outliving = self._ends.step_ended()
        if self._keys.first is None:  # nothing was saved
            return
        self._finish_observers(outliving)
        self._plans.ended(self._keys.first, self._keys.kind)
        self.steps += 1
        self._clear()
        self._begin_observers()
        self._on_step_end()

    def end_step_if_graphs_are_gone(self) -> None:
        """Called when the session is left. A backward that follows outside still belongs to the step."""
        if self._ends.is_due() or (self._uses and self._living == 0):
            self.end_step()

    def _begin_observers(self) -> None:
        """Mark the beginning of the next step, and make its meter and recorder."""
        if self.gauges is None or self._transport is None:
            return
        self._begin = self.gauges.mark(self._transport.current_stream())
        self.gauges.take_peaks()
        if self.steps >= self.options.warmup_steps:
            self._meter = Meter(self.gauges, self._begin)
            if self.options.planner is not None or self.recording is None:
                self._recorder = Recorder(self.gauges, self._begin, self._modules.parameters.nbytes())

    def _abandon_recorder(self) -> None:
        if self._recorder is not None:
            self._recorder.abandon()
            self._recorder = None

    def _finish_observers(self, outliving: list[ManagedStorage]) -> None:
        transport, gauges = self._transport, self.gauges
        if transport is None or gauges is None:
            return
        begin, peaks = gauges.mark(transport.current_stream()), gauges.take_peaks()
        # Copies of freed graphs, and offloaded storages of live ones, must not count in the next step.
        for managed in outliving:
            managed.release()
        transport.drop_released()
        if self._meter is not None:
            self._meter.finish(begin, gauges.mark(transport.current_stream()), peaks[0])
            self._meter_of_last_step = self._meter
        if self._recorder is not None:
            info, has_data = transport.device.info, not transport.fake
            device = transport.torch_device.type, info.name, info.total_bytes
            self.recording = self._recorder.finish(begin, peaks[1], *device, has_data=has_data)
            self._plans.recorded(self.recording, self.timeline if self._plans.is_planning else None, self._keys.kind)
        elif self._meter is not None and self._executor is not None:
            self._plans.executed(self._executor, self._meter, self._keys.kind)

    # Called in the hooks, in this order.

    @contextlib.contextmanager
    def hook(self, transport: Transport) -> Iterator[None]:
        """A context around everything that a hook does on the device."""
        if self._transport is None:
            self._transport = transport
            self.gauges = None if self.options.gauges_for is None else self.options.gauges_for(transport)
            self._begin_observers()
        if self._busy or transport is not self._transport:
            yield
            return
        self._busy = self._thread.is_in_hook = True
        try:
            with self._observed(transport):
                yield
                if self._executor is not None:
                    self._executor.make_moves()
        finally:
            self._busy = self._thread.is_in_hook = False

    @contextlib.contextmanager
    def _observed(self, transport: Transport) -> Iterator[None]:
        gauges = self.gauges
        if gauges is None:
            yield
            return
        self._reload_marks: tuple[Mark | None, Mark | None] = (None, None)
        begin, peaks = gauges.mark(transport.current_stream()), gauges.take_peaks()
        if self._recorder is not None:
            self._recorder.reached(begin, peaks[1])
        try:
            yield
        finally:
            end, own_peaks = gauges.mark(transport.current_stream()), gauges.take_peaks()
            if self._recorder is not None:
                self._recorder.left(end)
            if self._meter is not None:
                marks = (begin, *self._reload_marks, end)
                self._meter.hook(max(self._point, 0), marks, max(peaks[0], own_peaks[0]))

    @property
    def _is_in_hook(self) -> bool:  # True if this thread is in a watched hook
        return getattr(self._thread, "is_in_hook", False)

    @contextlib.contextmanager
    def reloading(self, transport: Transport) -> Iterator[None]:
        """A context around a reload that a use waits for."""
        if self._meter is None or not self._is_in_hook or self.gauges is None:
            yield
            return
        begin = self.gauges.mark(transport.current_stream())
        yield
        self._reload_marks = (begin, self.gauges.mark(transport.current_stream()))

    def step_ends_before_this_save(self) -> bool:
        return self._ends.is_due_before_save(graphs_are_gone=self._uses > 0 and self._living == 0)

    def saved(self, managed: ManagedStorage, tensor: torch.Tensor, *, is_new: bool, is_aliased: bool) -> Action | None:
        """The planned action; None if no plan has this save. `is_aliased`: another version of its storage was saved
        before."""
        if not self._is_in_hook:
            return None
        lifetime = None if is_new else self._lifetime_of(managed)
        if not is_new and lifetime is None:  # a save of an earlier step: not a point of this one
            if self._recorder is not None:
                self._recorder.used_earlier_save()
            return None
        is_first = self._keys.first is None
        key = self.place = self._keys.key(tensor, self._modules.path())
        if is_first:
            self._choose_executor(key)
        self._point += 1
        lifetime = self._adopt(managed) if lifetime is None else lifetime
        if self._recorder is not None:
            self._recorder.saved(managed, lifetime, key, is_new=is_new, is_aliased=is_aliased)
        if self._executor is None:
            return None
        planned = self._executor.saved(managed, key, is_new)
        if planned is not None:
            self._planned[lifetime] = planned
        known = self._planned.get(lifetime)
        return None if known is None else self._executor.plan.lifetimes[known].action

    # Recomputes.

    @property
    def looks_for_recomputes(self) -> bool:
        """True in steps that follow no plan, if they are recorded or may be."""
        has_use = self.options.planner is not None or self.recording is None
        return self._is_in_hook and has_use and self._executor is None and self.gauges is not None

    def can_be_recomputed(
        self, managed: ManagedStorage, operation: str, inputs: list[ManagedStorage], cost: RecomputeCost
    ) -> None:
        lifetimes = [self._lifetime_of(one) for one in (managed, *inputs)]
        if self._recorder is not None and None not in lifetimes:
            self._recorder.can_be_recomputed(lifetimes, operation, cost)  # type: ignore[arg-type]

    def cannot_be_recomputed(self, managed: ManagedStorage) -> None:
        self._notify(Recorder.cannot_be_recomputed, managed)
        if self._executor is not None:
            self._executor.not_recomputed(managed)

    def encoded(self, managed: ManagedStorage, key: SaveKey) -> Action | None:
        """The planned action for encoded bytes. No recording has them: their lifetime is that of the plan, inverted."""
        if not self._is_in_hook or self._executor is None:
            return None
        self._point += 1
        planned = self._executor.saved(managed, key, is_new=True)
        if planned is None:
            return None
        managed.lifetime, managed.epoch, managed.observer = ~planned, self._epoch, self
        self._planned[~planned] = planned
        return self._executor.plan.lifetimes[planned].action

    @contextlib.contextmanager
    def recomputing(self, transport: Transport) -> Iterator[None]:
        """A context around the recompute of a discarded storage: it computes, and its operands have hooks."""
        if self._recorder is None or self.gauges is None:
            yield
            return
        with self._recorder.recomputing(self.gauges.mark(transport.current_stream())):
            yield

    def _adopt(self, managed: ManagedStorage) -> int:
        lifetime = managed.lifetime = self._lifetimes
        managed.epoch = self._epoch
        managed.observer = self
        managed.on_end = functools.partial(self._ended, self._lifetimes, self._ends.alive, self._recorder)
        self._lifetimes += 1
        self._living += 1
        self._ends.alive[lifetime] = managed.reference
        return lifetime

    def _ended(self, lifetime: int, alive: Alive, recorder: Recorder | None) -> None:
        self._living -= 1
        alive.pop(lifetime, None)
        if recorder is not None:
            recorder.ended(lifetime)

    def _lifetime_of(self, managed: ManagedStorage) -> int | None:
        return managed.lifetime if managed.epoch == self._epoch else None

    def _choose_executor(self, first: SaveKey) -> None:
        self._executor = self._plans.choose(first)
        if self._transport is not None:
            # A plan itself bounds the bytes that copies in flight hold.
            self._transport.set_windows(open_wide=self._executor is not None)
        if self._executor is not None:
            self._executor.begin_step()
            if self.options.planner is not None:
                self._abandon_recorder()

    def used(self, managed: ManagedStorage) -> bool:
        """True if a plan decides when this storage and later ones are reloaded."""
        if not self._is_in_hook:
            return False
        lifetime = self._lifetime_of(managed)
        if lifetime is None:
            self._ends.used_earlier_save()
            if self._recorder is not None:
                self._recorder.used_earlier_save()
            return False
        self._uses += 1
        self._point += 1
        if self._recorder is not None:
            self._recorder.used(lifetime)
        planned = self._planned.get(lifetime)
        if self._executor is None or planned is None:
            return False
        self._executor.used(planned)
        return True

    # Called when the copies of a storage change.

    def completed(self, managed: ManagedStorage) -> None:
        self._notify(Recorder.completed, managed)

    def released_reload(self, managed: ManagedStorage) -> None:
        self._notify(Recorder.released_reload, managed)

    def about_to_reload(self, managed: ManagedStorage) -> None:
        self._notify(Recorder.about_to_reload, managed)

    def _notify(self, notice: Callable[[Recorder, int], None], managed: ManagedStorage) -> None:
        lifetime = self._lifetime_of(managed)
        if self._recorder is not None and lifetime is not None and lifetime >= 0:
            notice(self._recorder, lifetime)

    def offloaded(self, managed: ManagedStorage, copy: _C.HostCopy) -> None:
        lifetime = self._lifetime_of(managed)
        if self._meter is not None and lifetime is not None:
            span = managed.transport.queue.span(copy)
            self._meter.copied(Track.TO_HOST, max(lifetime, ~lifetime), managed.nbytes, span)

    def reloaded(self, managed: ManagedStorage, reload: _C.Reload) -> None:
        lifetime = self._lifetime_of(managed)
        if self._meter is not None and lifetime is not None:
            self._meter.copied(Track.TO_DEVICE, max(lifetime, ~lifetime), managed.nbytes, reload.span)
