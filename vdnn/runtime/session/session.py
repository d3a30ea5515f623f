"""The session: the context manager around a training loop, or around a step of it.

Entering installs the hooks on this thread, exiting removes them. A tensor saved inside may be used after the exit, at
any time: packed objects carry all they need. A session may be entered again, and on several threads at once. Sessions
nest as torch's saved-tensor hooks do: the innermost of a thread handles its saves. The work is the engine's, which a
session may share with earlier ones; the counts are the session's own.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch

from vdnn.errors import VdnnError
from vdnn.planning.policies import OnlinePolicy
from vdnn.runtime.session.as_needed import AsNeeded, Extent
from vdnn.runtime.session.engine import Engine, EngineOptions, choosing, engine_for
from vdnn.runtime.session.report import session_report
from vdnn.runtime.storage.counters import Counters, Kept
from vdnn.runtime.torch_internals.saved_hooks import leave_hooks, top_hooks_are
from vdnn.runtime.training_state.gradient_passes import GradientPasses
from vdnn.runtime.training_state.interrupts import interrupts_wait
from vdnn.runtime.training_state.optimizer_state import OptimizerState
from vdnn.runtime.training_state.parameters.managed_parameters import ManagedParameters
from vdnn.runtime.training_state.slices import parameters_of
from vdnn.runtime.training_state.state_room import StateKind
from vdnn.step.plan import Plan
from vdnn.step.plan_use import Followed
from vdnn.step.recording import Recording
from vdnn.step.saved_step import SavedStep
from vdnn.step.timeline import Timeline
from vdnn.user_warnings import warn

_this_thread = threading.local()


class _EnteredSession(NamedTuple):
    """A session that a thread has entered, with the hooks it installed there, and the counters that it replaced."""

    session: Session
    engine: Engine
    hooks: torch.autograd.graph.saved_tensors_hooks
    counters_before: Counters
    optimizer_steps: int  # that the engine had seen before


def _entries_of_thread() -> list[_EnteredSession]:
    """The sessions that this thread has entered, the outermost first."""
    entered: list[_EnteredSession] | None = getattr(_this_thread, "entered", None)
    if entered is None:
        entered = _this_thread.entered = []
    return entered


class Session(contextlib.ContextDecorator):
    """The context manager that vdnn.offload returns. It also works as a decorator."""

    def __init__(
        self,
        options: EngineOptions,
        key: Hashable | None = None,
        optimizer_states: Sequence[OptimizerState] = (),
        parameters: ManagedParameters | None = None,
        *,
        steps_on_cpu: bool = False,
        gradients: bool = False,
        defers_steps: bool = False,
        as_needed: AsNeeded | None = None,
    ) -> None:
        """Sessions with one key share an engine, see [Note: As one]; With None, the session shares its engine with no
        other. With `as_needed`, `parameters` and `gradients` are chosen when the session begins, and later."""
        self.counters = Counters()
        self._optimizer_states = optimizer_states
        self._parameters = parameters
        self._steps_on_cpu = steps_on_cpu
        self._has_gradients = gradients
        self._defers_steps = defers_steps
        self._as_needed = as_needed
        self._options = options
        self._key = key
        self._engine_or_none: Engine | None = None

    @property
    def _engine(self) -> Engine:
        if self._engine_or_none is None:
            with choosing:
                if self._engine_or_none is None:
                    self._engine_or_none = engine_for(self, self._options, self._key, None, enters=False)
        return self._engine_or_none

    @property
    def policy(self) -> OnlinePolicy:
        return self._options.policy

    # Entering and exiting.

    def __enter__(self) -> Session:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise VdnnError("vdnn.offload cannot be entered while a CUDA graph is being captured. Capture without it.")
        with choosing:
            engine = engine_for(self, self._options, self._key, self._engine_or_none, enters=True)
            self._engine_or_none = engine
        try:
            engine.states_begin(self._optimizer_states)
            if self._as_needed is not None:
                self._choose_extent(self._as_needed, engine)
            hooks = engine.packer.hooks()
            hooks.__enter__()
        except BaseException:  # raised where saved-tensor hooks are disabled
            engine.uninstall(self)
            raise
        try:
            if self._manages_state:
                self._take_training_state(engine)
        except BaseException:
            hooks.__exit__()
            engine.uninstall(self)
            raise
        _entries_of_thread().append(_EnteredSession(self, engine, hooks, engine.saves.counters, engine.optimizer_steps))
        engine.saves.counters = self.counters
        engine.resumed()
        return self

    def __exit__(self, kind: object, *exception: object) -> None:
        entered = _entries_of_thread()
        if not entered or entered[-1].session is not self:
            raise VdnnError("exit a vdnn session on the thread that entered it, the last entered first.")
        _, engine, hooks, counters_before, steps_before = entered.pop()
        leave_hooks(hooks)
        engine.uninstall(self)
        try:
            self._leave(engine, entered, counters_before, steps_before, is_whole=kind is None)
        finally:  # plans outlive an exception
            engine.leave_plans()

    def _leave(
        self,
        engine: Engine,
        entered: list[_EnteredSession],
        counters_before: Counters,
        steps_before: int,
        *,
        is_whole: bool,
    ) -> None:
        """`entered`: what this thread is still inside. `is_whole`: no exception ends it."""
        if self._manages_state:
            self._leave_training_state()
        if any(entry.engine is engine for entry in entered):
            engine.saves.counters = counters_before
        elif is_whole:
            engine.left()
            self._warn_if_nothing_was_offloaded(engine)
            wants_saves = self._as_needed is not None or not self._manages_state  # training state alone needs none
            if not self.counters.saves and wants_saves and self.policy.name != "keep":
                engine.unseen.nothing_was_saved(engine.optimizer_steps - steps_before)
            engine.compare_hashes()
        if entered:
            entered[-1].engine.resumed()

    def _leave_training_state(self) -> None:
        with contextlib.ExitStack() as leaving:  # all of them, though one may raise: a deferred step runs now
            if self._parameters is not None:
                leaving.callback(self._parameters.leave)
            for state in reversed(self._optimizer_states):
                if self._has_gradients:
                    leaving.callback(state.gradients.leave)
                leaving.callback(state.left)

    @property
    def _manages_state(self) -> bool:
        return bool(self._optimizer_states) or self._parameters is not None

    def _take_training_state(self, engine: Engine) -> None:
        """Manages the state of the session's optimizers and the parameters of its model, all or none."""
        with contextlib.ExitStack() as managed:
            for state in self._optimizer_states:
                state.managed_by(
                    self,
                    engine.transport_for,
                    self._options.min_bytes,
                    on_cpu=self._steps_on_cpu,
                    stays=engine.state_room.holds_state,
                    before_step=self._grow_as_needed,
                )
                managed.callback(state.left)
                engine.optimizer_states.add(state)
                if self._has_gradients:
                    self._take_gradients(engine, state)
                    managed.callback(state.gradients.leave)
                if self._defers_steps:
                    state.defer_steps()
            if self._parameters is not None:
                self._take_parameters(engine, self._parameters)
            managed.pop_all()

    def _take_gradients(self, engine: Engine, state: OptimizerState) -> None:
        min_bytes, stays = self._options.min_bytes, engine.state_room.holds_gradient
        state.gradients.enter(state.optimizer, engine.transport_for, min_bytes, GradientPasses(), stays)

    def _take_parameters(self, engine: Engine, parameters: ManagedParameters) -> None:
        if engine.parameter_saves is None:
            return
        there = [state.optimizer for state in self._optimizer_states if not state.is_gone]
        trained = [one for optimizer in there for one in parameters_of(optimizer)]
        min_bytes, recheck = self._options.min_bytes, self._options.recheck
        parameters.enter(engine.transport_for, engine.parameter_saves, min_bytes, trained, recheck)
        parameters.keep(engine.state_room.staying[StateKind.PARAMETERS])  # as in the session before
        engine.steps.leave_room_for(parameters.ahead_bytes())

    # What leaves, see as_needed.py.

    def _choose_extent(self, as_needed: AsNeeded, engine: Engine) -> None:
        """Called as this thread enters the session, before anything leaves."""
        if engine.times_entered(self) > 1:
            return
        before, error = engine.extents.of(as_needed.model), engine.extents.error(as_needed)
        extent = before
        if extent is None:
            extent = as_needed.at_begin(engine.transport_for, engine.budget_bytes)
        elif error is not None:  # the session before was left with it
            extent = as_needed.beyond(extent, error, engine.extents, engine.transport_for)
        engine.extents.begin(as_needed, extent, self._grow_between_steps)
        as_needed.note(extent, error)
        self._has_gradients = extent >= Extent.GRADIENTS
        self._parameters = as_needed.parameters if extent >= Extent.PARAMETERS else None
        if extent >= Extent.PARAMETERS:
            engine.manage_parameters()
        staying = as_needed.staying() if before is None else None
        if extent > (before or Extent.STATE):
            engine.grow()
        if staying is not None:
            engine.state_room.follow(staying)

    def _grow_as_needed(self, *, is_between_steps: bool = False) -> None:
        """Called before an optimizer of this session steps, and between steps: gradients, or parameters too, leave from
        now on if a step was refused and nothing else runs."""
        as_needed, engine = self._as_needed, self._engine_or_none
        error = None if as_needed is None or engine is None else engine.extents.error(as_needed)
        if as_needed is None or engine is None or error is None:
            return
        if all(state.is_gone for state in self._optimizer_states):  # no more can leave
            engine.extents.give_up()
            raise error
        now = Extent.GRADIENTS if self._has_gradients else Extent.STATE
        extent = as_needed.beyond(now, error, engine.extents, engine.transport_for)
        may_grow = self._may_grow(engine)
        is_good_time = extent < Extent.PARAMETERS or engine.steps.are_graphs_gone  # parameters that graphs hold stay
        if not (may_grow and is_good_time) and (is_between_steps or engine.extents.waits(error, may_grow=may_grow)):
            return
        try:
            with interrupts_wait():
                self._grow(as_needed, engine, extent)
        except VdnnError:
            engine.extents.give_up()
            raise error from None
        as_needed.note(extent, error)

    def _grow_between_steps(self) -> None:
        self._grow_as_needed(is_between_steps=True)

    def _may_grow(self, engine: Engine) -> bool:
        entered = _entries_of_thread()
        is_inner = bool(entered) and entered[-1].session is self and top_hooks_are(entered[-1].hooks)
        return is_inner and engine.is_alone_and_idle(self)

    def _grow(self, as_needed: AsNeeded, engine: Engine, extent: Extent) -> None:
        if not self._has_gradients:
            with contextlib.ExitStack() as taken:
                for state in self._optimizer_states:
                    if not state.is_gone:
                        self._take_gradients(engine, state)
                        taken.callback(state.gradients.leave)
                taken.pop_all()
            self._has_gradients = True
        if extent >= Extent.PARAMETERS:
            parameters = as_needed.parameters
            engine.manage_parameters()
            entry = _entries_of_thread()[-1]
            entry.hooks.__exit__()
            hooks = engine.packer.hooks()
            hooks.__enter__()
            _entries_of_thread()[-1] = entry._replace(hooks=hooks)
            self._take_parameters(engine, parameters)
            self._parameters = parameters
        engine.extents.begin(as_needed, extent, self._grow_between_steps)
        engine.grow()

    def close(self) -> None:
        """Waits for all copies and returns host memory and streams, also those of sessions that share them. A graph
        saved inside can then run backward only if its storages are still on the device. Otherwise they are returned
        with the session, or, if others can share them, kept until the process or the device ends. A closed session does
        not hold its model."""
        if self._engine_or_none is not None:
            self._engine_or_none.close()
        for holder in (self._parameters, self._as_needed):
            if holder is not None:
                holder.let_go()

    def look_into(self, model: torch.nn.Module) -> None:
        """Raises if the model contains a part that cannot run in a session. The first call of a model inside a session
        does the same."""
        self._engine.look_into(model)

    # Steps.

    def step(self) -> None:
        """Marks the end of a training step. Without this call the session detects the ends of steps."""
        self._engine.end_step()

    @property
    def num_steps(self) -> int:
        """The number of completed steps, with those of earlier sessions whose plans this one shares. In a session
        with the policy "keep" or one of your own, and without a plan and a measurement, a step ends at session.step()
        or an optimizer's step only."""
        return self._engine.steps.steps

    @property
    def recording(self) -> Recording | None:
        """The saves and uses of one step, or of one micro-batch where each is planned by itself: of the one that `plan`
        was made from, and without a plan of the last that was recorded. None until one whole step after the warm-up has
        run, and None in a session that does not measure."""
        return self._engine.steps.recording

    @property
    def plan(self) -> Plan | None:
        """The plan that the session follows. None if it makes none, also where steps repeat an earlier one."""
        return self._engine.steps.plan

    @property
    def timeline(self) -> Timeline | None:
        """The timeline of the last measured step, or None. A session with ``measure=True`` measures every whole step
        after the warm-up; one with a budget those that it records, and the first that follow each plan. Reading it may
        block until the device has completed that step."""
        return self._engine.steps.timeline

    @property
    def host_bytes(self) -> int:
        """The largest number of bytes of host memory that has been pinned at one time for this session, or for those
        that share with it."""
        return sum(transport.pool.stats.pinned_peak_bytes for transport in self._engine.transports.opened())

    def save(self, run: str | os.PathLike[str], name: str = "step") -> None:
        """Writes the recording, plan and timeline to a folder that `vdnn report` reads, as far as the session has them,
        and which steps followed which plans: see those properties. The recording is the one that the plan was made
        from. If the last step was of another size, the timeline is the predicted one. May block as `timeline` does."""
        steps = self._engine.steps
        use, planned = steps.plan_use, steps.predicted()
        if use is None or planned is None or use.last is Followed.OWN_SIZE:
            step = SavedStep(name, self.recording, self.plan, None, self.timeline, plan_use=use)
        else:
            step = SavedStep(name, planned[0], self.plan, planned[1], None, plan_use=use)
        step.save(run)

    # Reports.

    def report(self) -> str:
        """Text: what the session saved, moved and kept, and the reasons."""
        engine = self._engine
        recipe_lines = engine.tolerance.lines() + engine.rechecks.lines()
        for state in self._optimizer_states:
            recipe_lines += state.lines()
        if self._as_needed is not None:
            recipe_lines += self._as_needed.lines
        if self._manages_state:
            recipe_lines += engine.state_room.lines
        if self._parameters is not None:
            recipe_lines += self._parameters.lines()
        return session_report(self._asked_for(), self.counters, engine.transports.opened(), engine.steps, recipe_lines)

    def _asked_for(self) -> str:
        """The policy and the budget, and what decides before there is a plan."""
        steps = self._options.steps
        if steps is None or steps.planner is None:
            return self.policy.name
        planner = steps.planner
        budget = "the memory of the device" if planner.budget is None else planner.budget
        is_least = planner.budget is not None and planner.budget.is_least  # known once a step was recorded
        guarded = "" if is_least else " for what does not fit"
        before = f"; until its plan: {self.policy.name}{guarded}" if self.plan is None else ""
        return f"{planner.policy.name}, budget {budget}{before}"

    def _warn_if_nothing_was_offloaded(self, engine: Engine) -> None:
        counters = self.counters
        if engine.has_warned or self.plan is not None:  # a step that is smaller than planned may move nothing
            return
        moved = counters.storages + counters.discarded + counters.kept[Kept.FITS]
        if counters.saves and not moved and self.policy.name != "keep":
            engine.has_warned = True
            reasons = ", ".join(f"{count} x {reason.value}" for reason, count in counters.kept.most_common(3))
            warn(f"none of {counters.saves} saves was offloaded ({reasons or 'none eligible'}).")

    def paused(self) -> contextlib.AbstractContextManager[None]:
        return self._engine.saves.exemptions.paused()


def active_session() -> Session | None:
    """The innermost session of this thread, or None."""
    entered = _entries_of_thread()
    return entered[-1].session if entered else None
