"""Settles steps: learns the script of a step that follows a plan, and lets the native gate serve later ones.

A step is settled once two steps in a row that followed its plan had the same script. From its first save on the gate
serves it, until a save or a use differs from the script or the step ends. Then the Python hooks continue in the middle
of the step: `continue_in_python` brings the step, its executor and its guard to the point that the gate has reached.

[Note: What may settle] Steps that are neither recorded nor measured, whose saves were all as planned, and in which the
guard moved nothing. A save that the gate keeps is a save that the plan keeps, so its gradient is right even if another
tensor was saved in its place.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from vdnn import _C
from vdnn.runtime.steps.ends import StepEnds
from vdnn.runtime.steps.executor import EncodedSave, Executor
from vdnn.runtime.steps.kinds import Begin
from vdnn.runtime.steps.lesson import Lesson
from vdnn.runtime.steps.save_keys import Opening, SaveKeys
from vdnn.runtime.steps.script_sizes import ScriptSizes
from vdnn.runtime.steps.step_script import StepScript
from vdnn.runtime.steps.watched_step import WatchedStep
from vdnn.runtime.storage.counters import Counters
from vdnn.runtime.storage.managed_storage import ManagedStorage
from vdnn.runtime.storage.transport import Transport
from vdnn.runtime.storage.watched_lifetime import WatchedLifetime
from vdnn.runtime.torch_internals.module_watch import ModuleWatch
from vdnn.step.plan import Action
from vdnn.step.recording import SaveKey

# Learning ends after this many steps that differ each time, and after the gate was left this often. Each step that the
# gate serves to its end makes up for one.
_MOST_LESSONS = 8
_MOST_FAILURES = 3
# The most shapes of steps that are settled under one plan at a time. The script of one takes about 500 bytes of the
# host for each save and use: 0.25 MB for the 12 blocks of GPT-2.
_MOST_SHAPES = 32
_MOST_PATIENCE = 1024  # steps: see _Rest


@dataclass
class _ScriptHistory:
    """The script of the steps that follow one plan and begin with one save, and how they went."""

    script: StepScript | None = None  # of the last one
    is_settled: bool = False
    made_of: ScriptSizes | None = None  # the script was made of those of other sizes, and no step has followed it yet
    lessons: int = 0
    failures: int = 0


class _LastStep(NamedTuple):
    """The plan and script of the last step: most steps are like the one before."""

    executor: Executor
    opening: Opening
    history: _ScriptHistory


class Light(Protocol):
    """The storages that the gate moves."""

    def begin(self, followed: SettledStep) -> None: ...
    def end(self, counters: Counters) -> None: ...


class Leaves(Protocol):
    """The leaves that recipes read while no calls of modules are followed."""

    def step_ended(self, *, at_save: bool) -> bool: ...


class Unplanned(Protocol):
    """The saves that the gate keeps in steps without a plan."""

    native: _C.UnplannedSaves

    def begin(self, step: WatchedStep, transport: Transport) -> bool: ...
    def end(self) -> None: ...
    def take_over_all(self) -> None: ...


@dataclass
class _Rest:
    """When calls of modules need not be followed: see [Note: Rest] in module_watch.py. Each time that they had to be
    followed after all, it takes twice as many steps until they rest again."""

    patience: int = 1
    steps_left: int = 0

    def step_ended(self) -> bool:
        """A settled step that needs no calls is over. True if they may rest."""
        self.steps_left = max(0, self.steps_left - 1)
        return not self.steps_left

    def failed(self) -> None:
        self.patience = min(2 * self.patience, _MOST_PATIENCE)
        self.steps_left = self.patience


@dataclass
class SettledStep:
    """The settled step that runs."""

    script: StepScript
    step: WatchedStep
    executor: Executor
    counters: Counters
    history: _ScriptHistory
    modules: ModuleWatch
    needs_replay: bool = False  # the gate is closed, and the Python hooks have not continued
    to_encode: tuple[EncodedSave, ...] = ()  # at the event that is being served
    encoded_at: int = -1  # the last event at which that was done


class Settling:
    """The settled steps of one session. All that runs in hooks holds the lock of the saves."""

    def __init__(self, ends: StepEnds) -> None:
        self.gate: _C.Gate | None = None  # None: no step is settled
        self.light: Light | None = None
        self.unplanned: Unplanned | None = None
        self.followed: SettledStep | None = None  # until the step ends
        self._kept: WatchedStep | None = None  # the step without a plan whose saves the gate keeps
        self.is_expected = False  # the last step was settled from its first to its last save
        self.manage_kept: Callable[[SettledStep], None] = lambda _: None  # lets guards evict what the gate keeps
        self.leaves: Leaves | None = None
        self._ends = ends
        self._rest = _Rest()
        self._lesson: tuple[Lesson, _ScriptHistory] | None = None
        self._last: _LastStep | None = None
        self._histories: weakref.WeakKeyDictionary[Executor, OrderedDict[Opening, _ScriptHistory]]
        self._histories = weakref.WeakKeyDictionary()
        self._sizes: weakref.WeakKeyDictionary[Executor, dict[Begin, ScriptSizes]] = weakref.WeakKeyDictionary()

    def cut(self) -> None:
        """No step will be settled any more."""
        if self.gate is not None:
            self.gate.set_lesson(None)
        self.gate = self.light = self.unplanned = self._kept = self._lesson = self._last = None
        self.manage_kept = lambda _: None
        self.leaves = None
        self._ends.forget_gate()

    # At the first save of a step.

    def script_for(self, keys: SaveKeys) -> StepScript | None:
        """The script of the step that is expected, if it begins with these saves. Micro-batches of one step begin with
        saves of one key, and with other memory."""
        opening = keys.opening
        if opening is None or not self.is_expected:
            return None
        last = self._last
        if last is not None and last.opening == opening and last.history.is_settled:
            return last.history.script
        histories = [known[opening] for known in self._histories.values() if opening in known]
        return next((one.script for one in histories if one.is_settled and one.script is not None), None)

    def serves(self, step: WatchedStep, *, is_recorded: bool) -> bool:
        """True if the gate will serve the rest of this step, whose plan is chosen."""
        history = None if step.executor is None else self._history(step, step.executor)
        return history is not None and history.is_settled and not is_recorded

    def begin(
        self, step: WatchedStep, modules: ModuleWatch, counters: Counters, resident_bytes: int, *, may_settle: bool
    ) -> bool:
        """Called at the first save, whose key the step has. Opens the gate for a settled step, which the gate serves
        from this save on: then this is True. Learns any other step."""
        gate, executor = self.gate, step.executor
        history = None if executor is None else self._history(step, executor)
        if gate is None or executor is None or history is None or step.recorder is not None:
            self._follow_modules(modules)
            return False
        script = history.script if history.is_settled else None
        if script is None or not may_settle or step.meter is not None:
            self._follow_modules(modules)
            if script is None and history.lessons < _MOST_LESSONS:
                history.lessons += 1
                lesson = Lesson(step, executor, modules, counters, resident_bytes)
                self._lesson = lesson, history
                gate.set_lesson(lesson)
            return False
        if not modules.may_rest:
            self._follow_modules(modules)
        if modules.reads_frames:
            return False
        self.followed = SettledStep(script, step, executor, counters, history, modules)
        gate.open(script.native, None if modules.rests else modules.stack())
        if self.light is not None:
            self.light.begin(self.followed)
        self._ends.keeps_natively(gate)
        return True

    def _history(self, step: WatchedStep, executor: Executor) -> _ScriptHistory | None:
        opening = step.keys.opening
        if opening is None or self._ends.waits_for_graphs:
            return None
        last = self._last
        if last is not None and last.executor is executor and last.opening == opening:
            return last.history
        known = self._histories.setdefault(executor, OrderedDict())
        history = known.get(opening)
        if history is None:
            sizes = self._sizes_of(step, executor)
            script = sizes.script_for(opening[0], executor.plan)
            history = known[opening] = _ScriptHistory(script, script is not None, None if script is None else sizes)
            if len(known) > _MOST_SHAPES:
                known.popitem(last=False)
        known.move_to_end(opening)
        self._last = _LastStep(executor, opening, history)
        return history

    def _sizes_of(self, step: WatchedStep, executor: Executor) -> ScriptSizes:
        """The scripts of steps that begin like this one, by sizes."""
        begin, known = step.keys.begin, self._sizes.setdefault(executor, {})
        return ScriptSizes() if begin is None else known.setdefault(begin, ScriptSizes())

    # In a step without a plan.

    def keep_unplanned(self, step: WatchedStep, transport: Transport | None) -> None:
        """From now on the gate keeps the plain saves of this step, which has no plan."""
        unplanned, gate = self.unplanned, self.gate
        if unplanned is None or gate is None or transport is None or not unplanned.begin(step, transport):
            return
        self._kept = step
        self._ends.keeps_natively(gate)

    def close_unplanned(self) -> None:
        """The step may end before its next save: that is Python's."""
        if self.unplanned is not None and self._kept is not None:
            self.unplanned.native.close()

    def manage_unplanned(self) -> None:
        """From now on Python manages what the step has saved, and guards may evict it."""
        if self.unplanned is not None and self._kept is not None:
            self.unplanned.take_over_all()

    def number_of(self, save: _C.KeptSave) -> int | None:
        """The lifetime of a save that the gate keeps in this step; None for one of another step."""
        gate = self.gate
        return save.lifetime if self._kept is not None and gate is not None and save.step == gate.step else None

    # In the middle of a settled step.

    def gated_bytes(self) -> int:
        """The bytes that the gate keeps for the running step."""
        gate = self.gate
        return 0 if gate is None or (self.followed is None and self._kept is None) else gate.kept_bytes

    def leave(self) -> None:
        """Closes the gate. The step may be over. Then only the facts of a finished step are known again."""
        followed, gate = self.followed, self.gate
        if gate is None or followed is None or not gate.is_open:
            return
        end = gate.close()
        if self.light is not None:
            self.light.end(followed.counters)
        followed.script.count(followed.counters, end)
        if end == len(followed.script.events):
            followed.needs_replay = True
            followed.script.finish(followed.step)
            followed.history.failures = max(0, followed.history.failures - 1)
            if followed.history.made_of is not None:
                followed.history.made_of.served()
                followed.history.made_of = None
            self.is_expected = True
            return
        self.is_expected = followed.history.is_settled = False
        followed.history.script = None
        if followed.history.made_of is not None:  # it says nothing about steps of this size
            followed.history.made_of.failed()
            followed.history.made_of = None
        else:
            followed.history.failures += 1
        if followed.history.failures < _MOST_FAILURES:
            followed.history.lessons = 0
        self._replay(followed, end, has_encoded=followed.encoded_at == end)

    def continue_in_python(self) -> None:
        """The Python hooks continue in the middle of a step that the gate has served so far, if it has."""
        followed = self.followed
        if followed is None:
            return
        self.leave()
        if followed.needs_replay:
            followed.needs_replay = False
            self._replay(followed, len(followed.script.events))

    def _replay(self, followed: SettledStep, end: int, *, has_encoded: bool = False) -> None:
        self._follow_modules(followed.modules)
        followed.script.replay(followed.step, end, has_encoded=has_encoded)
        # A guard may have to evict what the gate kept. If a recompute reads it, later saves of the same bytes must find
        # the same storage.
        if followed.step.guard is not None or followed.executor.recomputes:
            self.manage_kept(followed)

    def _follow_modules(self, modules: ModuleWatch) -> None:
        if modules.rests:
            self._rest.failed()
            modules.follow()

    def leave_step(self) -> None:
        """The step is over. Saves of it that are still alive outlive it, and guards of later steps may evict them."""
        self.leave()
        followed = self.followed
        if followed is not None and followed.step.guard is not None:
            self.manage_kept(followed)
        self.manage_unplanned()

    def use_in_python(self, save: _C.KeptSave) -> bool:
        """Counts the use of a save that the gate kept in this step. False for a save of an earlier step."""
        followed, gate = self.followed, self.gate
        if self._kept is not None and gate is not None and save.step == gate.step:
            self._kept.used_natively(save.lifetime)
            return True
        if followed is None or gate is None or save.step != gate.step:
            return False
        followed.step.use_passed(save.lifetime, followed.script.planned.get(save.lifetime))
        return True

    # Recomputes and encoded bytes.

    def used_operand(self, packed: object) -> None:
        """A recompute has used a save, outside of the gate."""
        if self._lesson is not None:
            self._lesson[0].used_operand(packed)

    def encoded(self, managed: ManagedStorage, key: SaveKey) -> Action | None:
        """The planned action for bytes that were encoded in a settled step; None if that was not expected here."""
        followed = self.followed
        if followed is None or not followed.to_encode or followed.to_encode[0].key != key:
            return None
        planned = followed.to_encode[0].planned
        followed.to_encode = followed.to_encode[1:]
        managed.watch(WatchedLifetime(followed.step, None, planned))
        followed.executor.follow(planned, managed)
        return followed.executor.plan.lifetimes[planned].action

    def encoded_in_python(self, managed: ManagedStorage, key: SaveKey) -> None:
        """Bytes were encoded outside of the gate."""
        if self._lesson is not None:
            self._lesson[0].encoded(key, None if managed.watched is None else managed.watched.planned)

    # At the end of a step.

    def step_ended(self, modules: ModuleWatch, *, at_save: bool = False) -> None:
        """Called when the running step has ended, so that its script is complete. `at_save`: at the first save of the
        next one."""
        followed, self.followed = self.followed, None
        if followed is None:
            self.is_expected = False
        if self._kept is not None and self.unplanned is not None:
            self._kept = None
            self.unplanned.end()
        are_leaves_noted = self.leaves is None or self.leaves.step_ended(at_save=at_save)
        may_rest = self.is_expected and followed is not None and are_leaves_noted
        if modules.rests and not are_leaves_noted:
            self._follow_modules(modules)
        modules.step_ended(may_rest=may_rest and self._rest.step_ended())
        if self._lesson is None or self.gate is None:
            return
        (lesson, history), self._lesson = self._lesson, None
        self.gate.set_lesson(None)
        script, first = lesson.script(), lesson.step.keys.first
        if script is not None and first is not None:
            self._sizes_of(lesson.step, lesson.executor).learn(first, script)
        settled = None if script is None or history.script is None else script.settled_with(history.script)
        history.is_settled = settled is not None
        history.script = settled or script
