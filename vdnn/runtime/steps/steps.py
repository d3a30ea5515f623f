"""Follows a session's steps: finds where each begins and ends, and informs the recorder, the meter and the executor.

A step ends with session.step(), otherwise as ends.py decides. A step without saves is not counted.
The first step after the warm-up is recorded. With a planner, so are those of the warm-up, and one step of every further
kind: see plan_book.py. Only the first steps that follow a plan are measured, unless the session measures. Only the
first of several devices is watched.

A session that watches no steps only counts them. They answer the hooks as StepWatch does, so that watched and unwatched
saves take one path.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch.autograd.graph import Node

from vdnn._C import KeptSave
from vdnn.errors import VdnnError
from vdnn.planning.policies import OnlinePolicy
from vdnn.runtime.machine.gauges import Gauges
from vdnn.runtime.recompute.codecs import LOSSLESS
from vdnn.runtime.recompute.recompute_cost import RecomputeCost
from vdnn.runtime.steps.earlier_graphs import EarlierGraphs
from vdnn.runtime.steps.ends import Found, StepEnds
from vdnn.runtime.steps.executor import Executor
from vdnn.runtime.steps.guard import Guard
from vdnn.runtime.steps.host_meter import HostMeter
from vdnn.runtime.steps.measurement import BudgetLedger, MeasuredSteps, Meter, Over
from vdnn.runtime.steps.plan_book import PlanBook, Refused, is_refused
from vdnn.runtime.steps.plan_guard import PlanGuard
from vdnn.runtime.steps.plan_store import PlanFolder
from vdnn.runtime.steps.planner import BudgetPlanner
from vdnn.runtime.steps.recorder import Recorder
from vdnn.runtime.steps.settling import Settling
from vdnn.runtime.steps.watched_step import ObservedHook, WatchedStep
from vdnn.runtime.storage.counters import Counters, Kept
from vdnn.runtime.storage.managed_storage import ManagedStorage
from vdnn.runtime.storage.packed_view import PackedShard, PackedView
from vdnn.runtime.storage.transport import Transport
from vdnn.runtime.torch_internals.module_watch import ModuleWatch
from vdnn.step.forms import Form
from vdnn.step.plan import Action, Plan
from vdnn.step.plan_use import PlanUse
from vdnn.step.recording import Recording, SaveKey
from vdnn.step.timeline import Timeline


@dataclass(frozen=True, slots=True)
class StepOptions:
    """Options for steps. Without gauges nothing is recorded or measured; following a plan needs none. `measures`: every
    step is measured, not only those that are recorded or checked. `recomputes`: plans may recompute storages, or pack
    them by these codecs. `folder` has the plans of earlier runs."""

    gauges_for: Callable[[Transport], Gauges] | None = None
    measures: bool = False
    warmup_steps: int = 1
    plan: Plan | None = None
    planner: BudgetPlanner | None = None
    recomputes: bool = True
    codecs: tuple[str, ...] = LOSSLESS
    folder: PlanFolder | None = None
    online: OnlinePolicy | None = None  # decides in steps that nothing plans, and may recompute there

    @property
    def unmeasured_steps(self) -> int:
        """The first steps that are neither recorded nor measured. With a budget in bytes there are none. The budget
        "min" is the smallest possible peak of a step, and the first steps may have a smaller one than later steps."""
        return 0 if self.planner is not None and not self.planner.wants_the_least else self.warmup_steps


def _lacking(lacking_bytes: weakref.WeakMethod[Callable[[int], int]], nbytes: int) -> int:
    """Calls it, if its object still lives: a guard may be held longer, by the parts of that object."""
    method = lacking_bytes()
    return 0 if method is None else method(nbytes)


class StepGuards:
    """The guards of one session. `offload` issues a copy as soon as the running operation is over."""

    def __init__(
        self,
        planner: BudgetPlanner | None,
        plans: PlanBook,
        modules: ModuleWatch,
        settling: Settling,
        offload: Callable[[ManagedStorage], None],
        lacking_bytes: Callable[[int], int],
    ) -> None:
        """`lacking_bytes`, a method of the owner, tells how many of a number of bytes the budget lacks now."""
        self._planner = planner
        self._plans = plans
        self._modules = modules
        self._settling = settling
        self._offload = offload
        self._lacking_bytes = weakref.WeakMethod(lacking_bytes)
        self._transport: Transport | None = None  # of the last guard
        self.earlier = EarlierGraphs()

    def guard(
        self, transport: Transport | None, executor: Executor | None, resident_bytes: int, now_bytes: int
    ) -> Guard | None:
        """The guard of a step, or of the rest of one, with or without a plan. None if the step has no budget in bytes.
        `resident_bytes` were allocated when the step began, `now_bytes` at its first save."""
        budget_bytes = None
        if self._planner is not None and transport is not None:
            budget_bytes = self._planner.fixed_bytes(transport.device.info.total_bytes)
        if budget_bytes is None or transport is None:
            return None
        self._transport, transport.has_room = transport, None
        if executor is None:
            window_bytes = transport.wide_window_bytes
            taken_bytes = resident_bytes + self._modules.parameters.nbytes() + window_bytes
            guard = Guard(budget_bytes - taken_bytes, self._offload)
            guard.window_bytes, guard.in_flight_bytes = window_bytes, lambda: transport.in_flight_bytes
            guard.lacking_bytes = functools.partial(_lacking, self._lacking_bytes)
            guard.host_share = transport.host_share_from_now()
            transport.has_room = guard.has_room
        else:
            room_bytes = self._plans.room_bytes(executor, budget_bytes, now_bytes)
            if room_bytes is None:
                return None
            guard = PlanGuard(room_bytes, self._offload, executor, self._plans.unforeseen_bytes)
        guard.gated_bytes, guard.manage_gated = self._settling.gated_bytes, self._settling.manage_unplanned
        guard.earlier = self.earlier
        return guard

    def step_ended(self, guard: Guard | None, outliving: list[ManagedStorage]) -> int:
        """A step with this guard ended, and these of its storages are still alive. Copies of freed graphs, and
        offloaded storages of live ones, must not count in the next step. Returns the bytes that earlier graphs held in
        it."""
        earlier_bytes = sum(self.earlier.bytes)
        kept = {} if guard is None else guard.kept
        if guard is not None:
            guard.step_ended()
        if self._transport is not None:
            self._transport.has_room = None
        for managed in outliving:
            managed.release()
            managed.release_unused_reload()  # of a plan that took it for another storage
        self.earlier.step_ended(outliving, kept)
        return earlier_bytes


_sequence_nr: Callable[[], int] = torch._C._autograd._get_sequence_nr
# Results that get room: the product's, and the next one that is made from it before it is freed, such as its
# log_softmax.
_PRODUCTS = 2
_UNWATCHED = contextlib.nullcontext()  # around a hook that nobody watches, or that runs inside another one


def _product_bytes(step: WatchedStep, operand: torch.Tensor) -> int:
    """The bytes of room for the result of a matrix product that has saved its weight and now saves `operand`; 0 if it
    is none. The result may be far larger than all saves, such as the logits of a large vocabulary."""
    weight, size = step.weight, operand.shape
    if weight is None or len(size) != 2 or weight[0] != _sequence_nr() or size[1] != weight[1][0]:
        return 0
    return _PRODUCTS * int(size[0]) * int(weight[1][1]) * operand.itemsize


class StepWatch:
    """Follows the steps of one session. It is itself the context around each hook: see `hook`."""

    is_watching = True

    def __init__(
        self,
        options: StepOptions,
        modules: ModuleWatch,
        on_step_end: Callable[[], None],
        offload: Callable[[ManagedStorage], None],
        free_state: Callable[[], int] = lambda: 0,
        refused: Refused = is_refused,
    ) -> None:
        """`free_state` offloads the training state that stays on the device, and returns the bytes that this frees.
        `refused` is called before a step is refused. It returns True if more training state leaves from now on, so that
        the step can continue."""
        self.options = options
        self._free_state = free_state
        self._refused = refused
        self.recomputes = options.recomputes
        self.discards_online = options.online is not None and options.online.recomputes
        self.codecs = options.codecs
        self._on_step_end = on_step_end
        self._plans = PlanBook(options.plan, options.planner, options.folder, refused, options.online)
        self._resident_bytes = 0  # allocated when the step began
        self._modules = modules
        self.budget = BudgetLedger()
        self.steps = 0  # the number of finished steps
        self._warm_from = options.warmup_steps  # the number of steps that are finished when the warm-up is over
        self._measured = MeasuredSteps()
        self.transport: Transport | None = None
        self.gauges: Gauges | None = None
        self._ends = StepEnds()
        self.settling = Settling(self._ends)
        self._guards = StepGuards(options.planner, self._plans, modules, self.settling, offload, self._lacking_bytes)
        self._is_in_hook = False  # the thread that holds the lock of the saves is in a watched hook
        self._observed: ObservedHook | None = None  # None: nothing is measured
        self._host_meter: HostMeter | None = None
        self._has_passed_through = False  # a save of the running step
        self._ends_at_save = False  # the step that is ending ends at the first save of the next one
        self._step = WatchedStep(self._ends)

    # Results.
    @property
    def plan(self) -> Plan | None:
        executor = self._step.executor
        return self._plans.latest if executor is None or executor.repeats else executor.plan

    @property
    def save_key(self) -> SaveKey | None:
        """The key of the last save of this step."""
        return self._step.save_key

    @property
    def save_form(self) -> Form | None:
        """The form of that save, if it is known."""
        return self._step.save_form

    @property
    def stored_lines(self) -> list[str]:
        return self._plans.stored_lines

    @property
    def host_lines(self) -> list[str]:
        return self._plans.host_lines

    # What the optimizers' state asks.
    @property
    def is_planning(self) -> bool:
        return self._plans.is_planning

    @property
    def are_plans_settled(self) -> bool:
        return self._plans.are_settled

    @property
    def steps_over_budget(self) -> int:
        return self.budget.over.total()

    def predicted_ns(self, more_bytes: int) -> int | None:
        """Predicts the mean time of the steps that plans serve, with this many more bytes resident. None if they do not
        fit the budget."""
        return self._plans.predicted_ns(more_bytes)

    def fits_with(self, more_bytes: int) -> bool:
        return self._plans.fits_with(more_bytes)

    def leave_room_for(self, unrecorded_bytes: int) -> None:
        self._plans.leave_room_for(unrecorded_bytes)

    def record_anew(self, more_bytes: int) -> None:
        """Records steps again, because other training state is on the device from now on: see PlanBook."""
        self._plans.record_anew(more_bytes)

    @property
    def stores_plans(self) -> bool:
        return self._plans.stores

    @property
    def are_graphs_gone(self) -> bool:
        """True if no graph holds a save of the running step."""
        return self._ends.living == 0

    def begin_anew(self) -> None:
        """Begins again, because more training state leaves from now on. The running step is not planned if it has saved
        something. Plans are no longer stored: those in a plan folder are for steps from which only state leaves."""
        has_begun = self._step.keys.first is not None or self._step.is_later
        if has_begun:
            self._step.abandon_recorder()
        else:
            self._begin_observers(is_settled=False)
        self._warm_from = self.steps + has_begun + self.options.warmup_steps
        self._plans.forget_made()
        self._plans.store_no_more()

    def warm_up_again(self) -> None:
        """Called between steps. The next ones make new state of an optimizer, as the first ones did."""
        self._warm_from = max(self._warm_from, self.steps + self.options.warmup_steps)

    @property
    def first_difference(self) -> str | None:
        return self._plans.first_difference

    def predicted(self) -> tuple[Recording, Timeline] | None:
        return self._plans.predicted()

    @property
    def plan_use(self) -> PlanUse | None:
        return self._plans.use

    @property
    def recording(self) -> Recording | None:
        """The recording that the latest plan was made from, since a later one may know fewer recipes. Without a plan it
        is the last recorded step; reading that may block until the device has completed the step."""
        return self._plans.latest_recording or self._measured.recording

    @property
    def timeline(self) -> Timeline | None:
        """The timeline of the last measured step. Reading it may block until the device has completed the step."""
        return self._measured.timeline

    # The plan folder.

    def store_plans(self) -> None:
        """Writes the plans that were made since the last call."""
        self._plans.store()

    def stop_searching(self) -> None:
        """Called when the session is left. Cancels the search for better plans, until the next step."""
        self._plans.stop_searching()

    def forget_stored_plans(self) -> None:
        """Called when a recompute gave a wrong value. Removes the stored plans, so that the next run does not follow
        them."""
        self._plans.forget_stored()

    # Steps.

    def optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        self.settling.leave()
        self.settling.close_unplanned()
        found = self._ends.optimizer_stepped(id(optimizer), self._step.lifetimes)
        if found is Found.STEPS_WERE_MERGED or (found is Found.STEPS_WERE_SPLIT and self.steps):
            self._step.abandon_recorder()
        if found is Found.STEPS_WERE_SPLIT and self.steps:
            self.steps, self._warm_from = 0, self.options.warmup_steps
            self._measured.last_recorded = None
            self._plans.forget_made()
        if self._ends.is_due():
            self.end_step()

    def end_step(self) -> None:
        self.settling.leave_step()
        outliving = self._ends.step_ended()
        if self._step.keys.first is not None:
            self._end_micro_batch(outliving)
        elif self._has_passed_through:
            self._end_step_without_saves()
        elif not self._step.is_later:  # nothing was saved
            return
        self._has_passed_through = False
        self.budget.step_ended()
        self.steps += 1
        self._step = WatchedStep(self._ends, before=self._step)
        self._begin_observers(is_settled=self.settling.is_expected)
        self._on_step_end()

    def passes_through(self, transport: Transport) -> None:
        """Notes a save that stays as it is, on the device of `transport`. A step with such saves alone follows no plan,
        but its memory counts."""
        if self.transport is None:
            self._open(transport)
        self._has_passed_through = True

    @property
    def notes_what_passes_through(self) -> bool:
        """True if the first save that passes through has not been noted in this step, and a budget has to be
        checked."""
        return not self._has_passed_through and self.options.planner is not None

    def _end_step_without_saves(self) -> None:
        """Counts the memory of a step whose saves all passed through."""
        transport, gauges, planner = self.transport, self.gauges, self.options.planner
        self._step.abandon_recorder()
        self.settling.step_ended(self._modules, at_save=self._ends_at_save)
        if transport is None or gauges is None or planner is None:
            return
        gauges.mark(transport.current_stream())
        peak_bytes = gauges.step_ended()[0]
        if peak_bytes <= gauges.peak_before_bytes:  # it may be from before the step
            peak_bytes = gauges.allocated_bytes()
        budget_bytes = planner.fixed_bytes(transport.device.info.total_bytes)
        if budget_bytes is not None:
            self.budget.micro_batch_ended(peak_bytes, budget_bytes, Over.PASSED_THROUGH)

    def before_save(self) -> None:
        """Ends the running step, or its micro-batch, if it is over before this save. Each micro-batch is planned by
        itself."""
        if self.settling.followed is not None:
            self.settling.leave()
        are_gone = self._step.uses > 0 and self._graphs_are_gone
        if not are_gone and self._ends.is_within_step:
            return
        self._ends_at_save = True
        try:
            if self._ends.is_due_before_save(graphs_are_gone=are_gone):
                self.end_step()
            elif are_gone and self._plans.is_planning and self._ends.is_micro_batch_over(graphs_are_gone=are_gone):
                self._end_micro_batch([])
                self._step = WatchedStep(self._ends, is_later=True, before=self._step)
                self._begin_observers(is_settled=self.settling.is_expected)
        finally:
            self._ends_at_save = False

    def _end_micro_batch(self, outliving: list[ManagedStorage]) -> None:
        step = self._step
        self.settling.step_ended(self._modules, at_save=self._ends_at_save)
        self._plans.tell_kind(step.keys)
        self._finish_observers(step, outliving)
        self._plans.ended(step)
        step.close()
        if self._host_meter is not None and self.settling.gate is not None:
            self._host_meter.ended(self.settling.gate, is_whole=self.settling.is_expected)

    def end_step_if_graphs_are_gone(self) -> None:
        """Called when the session is left. A backward that follows outside still belongs to the step."""
        self.settling.leave()
        self.settling.close_unplanned()
        if self._ends.is_due_at_exit(graphs_are_gone=self._graphs_are_gone):
            self.end_step()
        self.settling.continue_in_python()
        if self.gauges is not None:
            self.gauges.pause()

    def resumed(self) -> None:
        """Called when the session is entered, or an inner one is left. Begins a step unless one is running."""
        self.settling.continue_in_python()
        if self.gauges is not None:
            self.gauges.resume()
            if self._step.keys.first is None:
                self._begin_observers(is_settled=self.settling.is_expected)

    def _begin_observers(self, *, is_settled: bool) -> None:
        """Marks the beginning of the next step, and makes its meter and recorder. A step that is expected to be settled
        has neither."""
        if self.gauges is None or self.transport is None:
            return
        begin = None if is_settled else self.gauges.mark(self.transport.current_stream())
        self.gauges.step_begins()
        if self._observed is not None:
            self._observed.step_begins()
        self._resident_bytes = self._step.resident_bytes = self.gauges.allocated_bytes()
        if is_settled:
            return
        if self.steps >= self.options.unmeasured_steps:
            self._step.meter = Meter(self.gauges, begin, self._resident_bytes)
            if self.options.planner is not None or self._measured.last_recorded is None:
                self._step.record(Recorder(self.gauges, begin, self._modules.parameters.nbytes()))

    def _finish_observers(self, step: WatchedStep, outliving: list[ManagedStorage]) -> None:
        transport, gauges = self.transport, self.gauges
        if transport is None or gauges is None:
            return
        begin, peaks = gauges.mark(transport.current_stream()), gauges.step_ended()
        earlier_bytes = self._guards.step_ended(step.guard, outliving)
        transport.release_sources()
        step.peak_bytes = max(step.own_peak(peaks[0], gauges.peak_before_bytes), gauges.take_trial_peak())
        judged = self._plans.judged(step, transport.device.info.total_bytes, earlier_bytes)
        if judged is not None:
            self.budget.micro_batch_ended(step.peak_bytes, *judged)
        self._plans.leave_host_to(transport.most_state_bytes, transport.pool.room_bytes)
        marks = begin, gauges.mark(transport.current_stream())
        measured = self._measured.finish(step.recorder, step.meter, transport, marks, peaks)
        if step.recorder is not None:
            if step.guard is not None:
                step.recorder.abandon()  # what outlives it counts in later steps only while it is on the device
            is_warm_up = self.steps < self._warm_from
            is_over = judged is not None and judged[1] is Over.NO_PLAN and step.peak_bytes > judged[0]
            self._plans.recorded(measured, step.keys, step.executor, is_warm_up, is_over, earlier_bytes)
        elif step.executor is not None:
            self._plans.executed(step.executor, step.peak_bytes, step.resident_bytes, step.keys.kind)

    # Called in the hooks, in this order.

    def hook(self, transport: Transport) -> AbstractContextManager[object]:
        """A context around everything that a hook does on the device."""
        if self.transport is None:
            self._open(transport)
        return _UNWATCHED if self._is_in_hook or transport is not self.transport else self

    def __enter__(self) -> None:
        """Begins a hook. This class is its own context manager, because one of contextlib's takes several times as
        long."""
        if self.settling.followed is not None:
            self.settling.continue_in_python()
        self._is_in_hook = True
        step = self._step
        try:
            if self._observed is not None and (step.recorder is not None or step.meter is not None):
                self._observed.begin(step)
        except BaseException:
            self.__exit__(BaseException)
            raise

    def __exit__(self, interruption: type[BaseException] | None, *_: object) -> None:
        """Ends a hook. `interruption`: the class of the exception that interrupted it."""
        try:
            step = self._step
            if interruption is not None:
                step.observed = None  # what was noted may not be whole
            elif step.executor is not None or step.guard is not None:
                step.make_moves()
        finally:
            observed = self._observed
            try:
                if observed is not None and observed.step is not None:
                    observed.end()
            finally:
                self._is_in_hook = False

    def _open(self, transport: Transport) -> None:
        """Called in the first hook that knows its device."""
        self.transport = transport
        if self.options.gauges_for is not None:
            self.gauges = self.options.gauges_for(transport)
            self._observed = ObservedHook(self.gauges, transport)
            if self.gauges.is_behind_host and self.options.planner is not None:
                self._host_meter = HostMeter(self._plans.host_measured)
        self._begin_observers(is_settled=False)

    def unpacked(self, packed: PackedView | PackedShard) -> torch.Tensor:
        """Unpacks a save, and marks how long the use waits for its reload."""
        return self._step.unpacked(packed, self.gauges if self._is_in_hook else None)

    @property
    def _graphs_are_gone(self) -> bool:
        return self._step.uses > 0 and self._ends.living == 0

    @property
    def is_in_hook(self) -> bool:
        return self._is_in_hook

    @property
    def is_before_first_save(self) -> bool:
        return self._step.keys.first is None

    def begins_settled(self, tensor: torch.Tensor, node: Node | None, counters: Counters) -> bool:
        """Called at the first save of a step, before it is managed, unless the storage belongs to an earlier step.
        Chooses the plan. Returns True if the gate serves the step from this save on."""
        return self._is_in_hook and self._begin(tensor, node, counters, may_settle=True)

    def _begin(self, tensor: torch.Tensor, node: Node | None, counters: Counters, *, may_settle: bool) -> bool:
        step = self._step
        step.next_key(tensor, node, self._modules)
        now_bytes = self._choose_executor(step)
        is_settled = self.settling.begin(step, self._modules, counters, now_bytes, may_settle=may_settle)
        if step.executor is None and self._ends.is_within_step:
            self.settling.keep_unplanned(step, self.transport)
        gate, executor, transport = self.settling.gate, step.executor, self.transport
        if is_settled and self._host_meter is not None and gate and executor is not None and transport is not None:
            self._host_meter.begin(gate, executor, transport)
        return is_settled

    def kept_natively(
        self, number: int, storage: torch.UntypedStorage, tensor: torch.Tensor, node: Node | None, *, is_new: bool
    ) -> None:
        """Called in a hook: the gate keeps a save of a step without a plan, whose storage has this number."""
        step = self._step
        step.kept_natively(number, storage, step.next_key(tensor, node, self._modules), is_new=is_new)
        if step.guard is not None:
            step.guard.leaves_room(self._expected_product(step, tensor))

    def saved(self, managed: ManagedStorage, tensor: torch.Tensor, node: Node | None, *, is_new: bool) -> Action | None:
        """The planned action; None if no plan has this save."""
        if not self._is_in_hook:
            return self._online_action(is_new=is_new)
        step = self._step
        if not is_new and step.lifetime_of(managed) is None:  # a save of an earlier step: not a point of this one
            if step.recorder is not None:
                step.recorder.used_earlier_save()
            return None
        if step.keys.first is None:
            self._begin(tensor, node, managed.facts.counters, may_settle=False)
        key = step.key_of_first if step.point < 0 else step.next_key(tensor, node, self._modules)
        action = step.saved(managed, key, is_new=is_new)
        if step.guard is not None and step.executor is None:
            self._leave_room_now(self._expected_product(step, tensor))
        if step.executor is not None and step.executor.is_outgrown and isinstance(step.guard, PlanGuard):
            self._guard_the_rest(step)
        return self._online_action(is_new=is_new) if action is None else action

    def _online_action(self, *, is_new: bool) -> Action | None:
        """The decision of the policy about a save that no plan has, before it is asked."""
        return Action.RECOMPUTE if is_new and self.discards_online else None

    def decided(self, managed: ManagedStorage, action: Action, reason: Kept | None = None) -> None:
        """The policy or a recipe has decided about a save that no plan has. `reason`: why it stays."""
        self._step.decided(managed, action, reason)

    @property
    def is_repeating(self) -> bool:
        """True in a step that has been as an earlier one until now, and follows what was decided there."""
        executor = self._step.executor
        return executor is not None and executor.repeats and not executor.is_outgrown

    def kept_for(self, managed: ManagedStorage) -> Kept:
        """The reason for which the plan keeps a storage."""
        return self._step.kept_for(managed)

    @property
    def has_guard_alone(self) -> bool:
        """True in a step that has a budget and no plan."""
        return self._step.guard is not None and self._step.executor is None

    def passed_weight(self, weight: torch.Tensor) -> int:
        """Notes, in a step that has a budget and no plan, a save that is a parameter: a matrix product may multiply the
        next save or the last one by it. Returns the bytes that a product with the last save needs beyond those that are
        left free for any operation."""
        step, shape = self._step, weight.shape
        guard, operand, number = step.guard, step.operand, _sequence_nr()
        step.weight = (number, shape) if len(shape) == 2 else None
        if guard is None or operand is None or operand[0] != number or len(shape) != 2 or operand[1][1] != shape[0]:
            return 0
        nbytes = _PRODUCTS * int(operand[1][0]) * int(shape[1]) * weight.itemsize
        return nbytes if guard.leaves_less(nbytes) else 0

    def make_room_for_product(self, nbytes: int) -> None:
        """Makes room for a matrix product between the two saves of an operation that has not begun, in a hook that is
        not a point."""
        if self._is_in_hook or self.transport is None:
            return
        with self.hook(self.transport):
            if self._step.recorder is not None:
                self._step.recorder.used_earlier_save()
            self._leave_room_now(nbytes)

    def _expected_product(self, step: WatchedStep, operand: torch.Tensor) -> int:
        """The bytes of room for the matrix product that saves `operand`; 0 if none is known. Notes the operand."""
        nbytes = _product_bytes(step, operand)
        step.weight = None
        step.operand = (_sequence_nr(), operand.shape) if operand.dim() == 2 else None
        return nbytes

    def lacks_room_for_product(self, operand: torch.Tensor) -> bool:
        """True if the matrix product that saves `operand` now has no room, in a step without a plan."""
        nbytes = _product_bytes(self._step, operand)
        return nbytes > 0 and self._lacking_bytes(nbytes) > 0

    def _leave_room_now(self, nbytes: int) -> None:
        """Leaves room for this many bytes besides the storages that the step keeps, from this hook on."""
        guard = self._step.guard
        if nbytes and guard is not None:
            guard.leaves_room(nbytes)
            guard.free_now(self._lacking_bytes(nbytes))

    def _lacking_bytes(self, nbytes: int) -> int:
        """How many of these bytes the budget has no room for, now."""
        planner, gauges, budget_bytes = self.options.planner, self.gauges, None
        if planner is not None and self.transport is not None:
            budget_bytes = planner.fixed_bytes(self.transport.device.info.total_bytes)
        if budget_bytes is None or gauges is None:
            return 0
        return max(0, self._allocated_bytes(gauges) + nbytes - budget_bytes)

    def guards(self, managed: ManagedStorage) -> bool:
        """True if the guard keeps a storage that the online policy would offload, until it has to be evicted."""
        return self._step.guards(managed)

    # Recomputes.

    @property
    def looks_for_recomputes(self) -> bool:
        """True in recorded steps without a plan that moves anything. Without a planner also in the steps ahead of the
        recorded one: a recipe that could not be tried there is tried again in the recorded step."""
        executor = self._step.executor
        if not self._is_in_hook or self.gauges is None:
            return False
        if self._step.recorder is not None and (executor is None or executor.keeps_everything):
            return True
        return self.options.planner is None and self._measured.last_recorded is None and executor is None

    def can_be_recomputed(
        self,
        save: ManagedStorage | KeptSave,
        operation: str,
        reads: Sequence[PackedView | KeptSave],
        cost: RecomputeCost,
    ) -> bool:
        """False if it would be recomputed from itself."""
        number, found = self._number_of(save), [self._number_of(one) for one in reads]
        numbers = [one for one in found if one is not None]
        if number is None or len(numbers) < len(found):
            return True
        if number in numbers:
            return False
        self._step.can_be_recomputed([number, *numbers], operation, cost)
        return True

    def can_discard(
        self,
        managed: ManagedStorage,
        reads: Sequence[PackedView | KeptSave],
        discard: Callable[[], bool],
        *,
        is_cheap: bool,
    ) -> None:
        """The guard of a step without a plan may discard a storage that can be recomputed from these saves."""
        guard, number = self._step.guard, self._number_of(managed)
        if guard is not None and number is not None and self.has_guard_alone:
            numbers = [one for save in reads if (one := self._number_of(save)) is not None]
            guard.can_discard(number, numbers, discard, is_cheap=is_cheap)

    def _number_of(self, save: ManagedStorage | PackedView | KeptSave) -> int | None:
        """The number that the storage's lifetime has in this step."""
        now = save.tensor if isinstance(save, KeptSave) and isinstance(save.tensor, PackedView) else save
        if isinstance(now, KeptSave):
            return self.settling.number_of(now)
        return self._step.number_of(now.managed if isinstance(now, PackedView) else now)

    def has_room_for_trial(self, transport: Transport, nbytes: int) -> bool:
        """True if the budget has room now for a trial that takes this many bytes. Always True without data, since a
        trial then takes no memory of the device."""
        return transport.fake or self.fits(transport, nbytes)

    def fits(self, transport: Transport, nbytes: int) -> bool:
        """True if the budget has room for this many bytes besides the bytes that are allocated now."""
        planner, gauges = self.options.planner, self.gauges
        budget_bytes = None if planner is None else planner.fixed_bytes(transport.device.info.total_bytes)
        if budget_bytes is None or gauges is None:
            return True
        return self._allocated_bytes(gauges) + nbytes <= budget_bytes

    def make_room_for_trial(self, transport: Transport, nbytes: int) -> bool:
        """Offloads storages that the step keeps, or waits for copies to the host, if a trial would exceed the budget.
        Returns False if there is still no room."""
        planner, gauges, step = self.options.planner, self.gauges, self._step
        budget_bytes = None if planner is None else planner.fixed_bytes(transport.device.info.total_bytes)
        if budget_bytes is None and step.executor is not None:
            budget_bytes = step.executor.plan.budget_bytes
        if budget_bytes is None or gauges is None or transport.fake:
            return True
        if step.guard is not None:
            step.guard.free_now(self._allocated_bytes(gauges) + nbytes - budget_bytes)
        return self._allocated_bytes(gauges) + nbytes <= budget_bytes

    @property
    def follows_stored_plan(self) -> bool:
        """True in a step that follows a plan of an earlier run. That run has tried its recipes."""
        return self._plans.follows_stored

    def _allocated_bytes(self, gauges: Gauges) -> int:
        observed = self._observed
        return gauges.allocated_bytes() if observed is None or observed.step is None else observed.allocated_bytes

    def cannot_be_recomputed(self, managed: ManagedStorage) -> None:
        self._step.cannot_be_recomputed(managed)

    def encoded(self, managed: ManagedStorage, key: SaveKey) -> Action | None:
        """The planned action for encoded bytes."""
        return self._step.saved_encoded(managed, key) if self._is_in_hook else None

    def recomputing(self, transport: Transport) -> AbstractContextManager[None]:
        """A context around the recompute of a discarded storage, whose operands are unpacked by hooks. Its time counts
        as compute."""
        return self._step.recomputing(self.gauges, transport)

    def _choose_executor(self, step: WatchedStep) -> int:
        """Chooses the plan of a step. Returns the bytes that are allocated now."""
        script = self.settling.script_for(step.keys)
        counted = None if script is None else script.allocated_bytes(self._resident_bytes)
        if counted is None:
            counted = 0 if self.gauges is None else self.gauges.allocated_bytes()
        now_bytes = counted
        # Gradients of the step before are often freed only now.
        self._resident_bytes = min(self._resident_bytes, now_bytes)
        if self.transport is not None:
            self._plans.restore(step.keys, self._modules, self.transport)
        freed_bytes = 0

        def free_state() -> int:
            nonlocal freed_bytes
            freed = self._free_state()
            freed_bytes += freed
            self._resident_bytes -= freed
            return freed

        try:
            movable_bytes, other_bytes = self._guards.earlier.bytes
            try:
                self._plans.require_foreseen_fit(step.keys, self._resident_bytes - movable_bytes, other_bytes)
            except VdnnError as error:
                if free_state():
                    self._require_foreseen_fit(step, movable_bytes, other_bytes)
                elif not self._refused(error, None):
                    raise
            executor, step.observed = self._plans.repeated(step.keys)
            if executor is None:
                executor = self._plans.choose(step.keys, now_bytes - movable_bytes - freed_bytes, free_state)
            if executor is None and self._plans.is_planning:
                free_state()
            step.executor = executor
        except VdnnError:
            step.was_refused()
            raise
        now_bytes -= freed_bytes
        if self.transport is not None:
            # A plan itself bounds the bytes that copies in flight hold, unless it repeats what the windows bounded.
            self.transport.set_windows(open_wide=executor is not None and not executor.repeats)
            host_bytes = self._plans.take_host_bytes()
            if host_bytes is not None:
                self.transport.fit_host_memory(host_bytes, is_awaited=self._plans.is_virtual)
        step.guard = self._guards.guard(self.transport, executor, self._resident_bytes, now_bytes)
        if executor is not None:
            executor.begin_step()
        elif step.guard is not None and self._observed is not None:
            step.guard.leaves_room(self._observed.most_between_bytes)
        if self.settling.is_expected and not self.settling.serves(step, is_recorded=self._plans.records_step):
            self._begin_observers(is_settled=False)
            if self._observed is not None and (step.recorder is not None or step.meter is not None):
                self._observed.begin(step)
        if self.options.planner is not None and not self._plans.records_step:
            step.abandon_recorder()
        if executor is not None and not self.options.measures:
            step.measure_only_checks(executor)
        return now_bytes

    def _require_foreseen_fit(self, step: WatchedStep, movable_bytes: int, other_bytes: int) -> None:
        """Called when all training state that may leave has left. Raises if the step still would not fit."""
        try:
            self._plans.require_foreseen_fit(step.keys, self._resident_bytes - movable_bytes, other_bytes)
        except VdnnError as error:
            if not self._refused(error, None):
                raise

    def _guard_the_rest(self, step: WatchedStep) -> None:
        """Called when the step has outgrown its plan. The guard may evict the storages that the plan keeps, and later
        saves."""
        step.guard = self._guards.guard(self.transport, None, self._resident_bytes, 0)
        if step.guard is not None and self.transport is not None:
            step.guard.take_over(step.kept())
            self.transport.set_windows(open_wide=False)

    def used_kept(self, save: KeptSave) -> None:
        """Counts a use, outside of the gate, of a save that the gate kept."""
        if not self.settling.use_in_python(save):
            self._used_earlier_save()

    def used(self, managed: ManagedStorage) -> bool:
        """True if a plan decides when this storage and later ones are reloaded."""
        if not self._is_in_hook:
            return False
        step, watched = self._step, managed.watched
        if watched is None or watched.observer is not step:
            self._used_earlier_save()
            return False
        if step.recorder is not None and step.guard is not None and self.has_guard_alone and managed.copy is not None:
            step.guard.used_evicted(managed)
        return step.used(watched)

    def _used_earlier_save(self) -> None:
        self._ends.used_earlier_save()
        if self._step.recorder is not None:
            self._step.recorder.used_earlier_save()


class UnwatchedSteps:
    """The steps of one session. A step ends at session.step() or at an optimizer's step."""

    is_watching = is_planning = are_plans_settled = stores_plans = are_graphs_gone = False
    recomputes = discards_online = is_repeating = False
    steps_over_budget = 0
    looks_for_recomputes = False
    codecs = LOSSLESS
    settling = budget = gauges = transport = recording = plan = plan_use = timeline = first_difference = save_key = None
    save_form = None
    follows_stored_plan = False
    stored_lines: tuple[str, ...] = ()
    host_lines: tuple[str, ...] = ()

    def __init__(self, on_step_end: Callable[[], None]) -> None:
        self.steps = 0  # the number of finished steps
        self._on_step_end = on_step_end

    def predicted(self) -> None:
        """Nothing was planned."""

    def predicted_ns(self, more_bytes: int) -> int | None:
        """Nothing was planned."""

    def fits_with(self, more_bytes: int) -> bool:
        """There is no budget."""
        return True

    def leave_room_for(self, unrecorded_bytes: int) -> None:
        """There is no budget."""

    def record_anew(self, more_bytes: int) -> None:
        """Nothing was planned."""

    def begin_anew(self) -> None:
        """Nothing was planned."""

    def warm_up_again(self) -> None:
        """Nothing is recorded."""

    def store_plans(self) -> None:
        """There are none."""

    def stop_searching(self) -> None:
        """Nothing is planned."""

    def forget_stored_plans(self) -> None:
        """There are none."""

    def resumed(self) -> None:
        """Does nothing: nothing is measured."""

    def optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        self.end_step()

    def end_step(self) -> None:
        self.steps += 1
        self._on_step_end()

    def end_step_if_graphs_are_gone(self) -> None:
        """Does nothing: nobody counts the graphs."""

    # Called in the hooks.

    def hook(self, transport: Transport) -> AbstractContextManager[object]:
        return _UNWATCHED

    def recomputing(self, transport: Transport) -> AbstractContextManager[None]:
        return _UNWATCHED

    def saved(self, managed: ManagedStorage, tensor: torch.Tensor, node: Node | None, *, is_new: bool) -> Action | None:
        """The policy decides."""

    def encoded(self, managed: ManagedStorage, key: SaveKey) -> Action | None:
        return None

    def can_be_recomputed(
        self,
        save: ManagedStorage | KeptSave,
        operation: str,
        reads: Sequence[PackedView | KeptSave],
        cost: RecomputeCost,
    ) -> bool:
        """Does nothing: there is no recording."""
        return True

    def can_discard(
        self,
        managed: ManagedStorage,
        reads: Sequence[PackedView | KeptSave],
        discard: Callable[[], bool],
        *,
        is_cheap: bool,
    ) -> None:
        """There is no guard."""

    def has_room_for_trial(self, transport: Transport, nbytes: int) -> bool:
        """There is no budget."""
        return True

    def fits(self, transport: Transport, nbytes: int) -> bool:
        """There is no budget."""
        return True

    def make_room_for_trial(self, transport: Transport, nbytes: int) -> bool:
        """There is no budget."""
        return True

    def cannot_be_recomputed(self, managed: ManagedStorage) -> None:
        """Does nothing: there is no recording."""

    def decided(self, managed: ManagedStorage, action: Action, reason: Kept | None = None) -> None:
        """Does nothing: no step is repeated."""


Steps = StepWatch | UnwatchedSteps
