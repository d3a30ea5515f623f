"""Plans of what an online policy did: the session follows them, so that its steps settle as those of planned sessions.

An online policy decides from the facts of each save alone, so it does the same in steps that save the same. The first
step of each kind and size runs under the policy itself, and a log notes the action of each storage and the points at
which it was released and reloaded. The plan of that log is followed from then on. Steps that differ from it are left to
the policy where they differ, and are logged again, a few times.

[Note: Plans that recompute] Under the policy itself each recipe is tried at each save. Under its plan rechecks compare
what recipes give, as under any plan. Recipes read copies of the operands that are not managed under both: no trial at
the use has shown whether the program writes to them (snapshots.py).
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from dataclasses import dataclass, field

from vdnn.runtime.steps.executor import Executor
from vdnn.runtime.steps.kinds import Kind, StepKinds
from vdnn.runtime.steps.save_keys import SaveKeys
from vdnn.runtime.storage.managed_storage import ManagedStorage
from vdnn.runtime.storage.transport import Transport
from vdnn.runtime.storage.watched_lifetime import WatchedLifetime
from vdnn.step.plan import Absence, Action, Plan, PlannedLifetime, PlannedPoint
from vdnn.step.recording import PointKind, SaveKey

_MOST_PLANS = 32  # as many as steps of one plan are settled in (settling.py)
_MOST_FAILURES = 3
_MOST_POINTS = 1 << 16  # a program that ends no step logs no more
_UNDECIDED_POINTS = 16  # until then it is known whether a mask is encoded, or an integer recomputed


@dataclass(slots=True)
class _LoggedLife:
    """One storage of the logged step. `absences`: the points of its releases and reloads, so far."""

    reference: weakref.ref[ManagedStorage]
    nbytes: int
    action: Action
    begin: int  # the point of its first save
    absences: list[tuple[int, int | None]] = field(default_factory=list)
    has_unused_reload: bool = False
    last_use: int = -1

    def planned(self, last: int) -> PlannedLifetime:
        if self.action is not Action.OFFLOAD:
            return PlannedLifetime(self.nbytes, self.action)
        # A copy that the window never asked to wait for: its source stays until the end.
        absences = self.absences or [(last - 1, None)]
        return PlannedLifetime(self.nbytes, self.action, tuple(Absence(*points) for points in absences))


class PolicyLog:
    """The log of one step: what the policy did. The step calls it in its hooks."""

    def __init__(self) -> None:
        self._points: list[tuple[PointKind, _LoggedLife, SaveKey | None]] = []
        self._lives: list[_LoggedLife] = []
        self._encoded: dict[WatchedLifetime, _LoggedLife] = {}
        self._on_device: list[_LoggedLife] = []  # whose source is there, and whose action may change
        self._demand_reloads = 0
        self._is_whole = True  # nothing prevents a plan so far

    def saved(self, managed: ManagedStorage, number: int, key: SaveKey, *, is_new: bool) -> None:
        if is_new:
            self._lives.append(self._begin(managed))
        self._demand_reloads = managed.facts.counters.demand_reloads
        self._add(PointKind.SAVE, self._lives[number], key)

    def saved_encoded(self, managed: ManagedStorage, watched: WatchedLifetime, key: SaveKey) -> None:
        life = self._encoded[watched] = self._begin(managed)
        self._add(PointKind.SAVE, life, key)

    def _begin(self, managed: ManagedStorage) -> _LoggedLife:
        life = _LoggedLife(managed.reference, managed.nbytes, managed.action, len(self._points))
        self._on_device.append(life)
        return life

    def _add(self, kind: PointKind, life: _LoggedLife, key: SaveKey | None) -> None:
        self._is_whole = self._is_whole and len(self._points) < _MOST_POINTS
        if self._is_whole:
            self._points.append((kind, life, key))

    def used(self, watched: WatchedLifetime) -> None:
        life = self._life_of(watched)
        if life is None:
            self._is_whole = False
            return
        managed, point = life.reference(), len(self._points)
        if managed is not None:
            life.action = managed.action
            reloads = managed.facts.counters.demand_reloads
            if reloads != self._demand_reloads and life.absences:
                life.absences[-1] = life.absences[-1][0], None  # on demand: the plan does the same
            self._demand_reloads = reloads
        life.has_unused_reload, life.last_use = False, point
        self._add(PointKind.USE, life, None)

    def _life_of(self, watched: WatchedLifetime) -> _LoggedLife | None:
        return self._encoded.get(watched) if watched.number is None else self._lives[watched.number]

    def about_to_reload(self, watched: WatchedLifetime) -> None:
        """A reload or a recompute is next."""
        life, point = self._life_of(watched), len(self._points) - 1
        managed = None if life is None else life.reference()
        if life is None or managed is None:
            return
        if managed.discarded is not None:
            return
        released = life.absences[-1][0] if life.absences else life.begin
        if not life.absences or life.last_use > released:  # the next absence
            released = max(life.last_use, released)
        else:
            life.absences.pop()
        life.absences.append((released, point if point > released else None))
        life.has_unused_reload = True

    def released_reload(self, watched: WatchedLifetime) -> None:
        life = self._life_of(watched)
        if life is not None and life.has_unused_reload:  # a trial's, or one that the backward pass skipped
            life.has_unused_reload = False
            life.absences[-1] = life.absences[-1][0], None

    def hook_ended(self) -> None:
        """Notes what was released in the hook."""
        point, left = len(self._points) - 1, []
        for life in self._on_device:
            managed = life.reference()
            if managed is None:
                continue
            life.action = managed.action
            if managed.source.storage is not None:
                if life.action is Action.OFFLOAD or point - life.begin < _UNDECIDED_POINTS:
                    left.append(life)
            elif life.action is Action.OFFLOAD and not life.absences:
                life.absences.append((point, None))
        self._on_device = left

    def plan(self, policy: str, transport: Transport) -> Plan | None:
        """The plan of the finished step; None if it cannot be followed."""
        lives, last = [*self._lives, *self._encoded.values()], len(self._points)
        recomputes = any(life.action in (Action.RECOMPUTE, Action.COMPRESS) for life in lives)
        finds_faults = transport.fake or transport.has_kernels or transport.integrity is not None
        if not self._is_whole or not lives or (recomputes and not finds_faults):
            return None
        numbers = {id(life): number for number, life in enumerate(lives)}
        points = [PlannedPoint(kind, numbers[id(life)], key) for kind, life, key in self._points]
        end = PlannedPoint(PointKind.END, None, None)
        info = transport.device.info
        lifetimes = tuple(life.planned(last) for life in lives)
        return Plan(policy, info.kind, info.name, None, (*points, end), lifetimes)


@dataclass(slots=True)
class _LikeSteps:
    """The steps of one kind and size. Without an executor the policy decides, and a log is written of the next one."""

    executor: Executor | None = None
    failures: int = 0


class PolicyPlans:
    """The plans of one session's online policy, by the kind of a step and its first save."""

    def __init__(self, policy: str) -> None:
        self._policy = policy
        self.forget()

    def forget(self) -> None:
        """The steps so far may have been parts of steps."""
        self._kinds = StepKinds()
        self._known: OrderedDict[tuple[Kind, SaveKey], _LikeSteps] = OrderedDict()

    def choose(self, keys: SaveKeys) -> tuple[Executor | None, PolicyLog | None]:
        """The executor of the step of which `keys` has the first save, or a log of what the policy does in it, or
        neither for steps that no plan describes."""
        expected = None if keys.begin is None else self._kinds.expected(keys.begin)
        known = None if expected is None or keys.first is None else self._known.get((expected.kind, keys.first))
        if known is None:
            return None, PolicyLog()
        if known.executor is not None:
            return known.executor, None
        return None, PolicyLog() if known.failures < _MOST_FAILURES else None

    def ended(self, keys: SaveKeys, followed: Executor | None, log: PolicyLog | None, transport: Transport) -> None:
        """A step is over, which followed a plan or was logged."""
        if keys.begin is None or keys.first is None:
            return
        self._kinds.ended(keys.begin, keys.kind)
        step = keys.kind, keys.first
        known = self._known.setdefault(step, _LikeSteps())
        self._known.move_to_end(step)
        if len(self._known) > _MOST_PLANS:
            self._known.popitem(last=False)
        if log is not None and known.executor is None:
            plan = log.plan(self._policy, transport)
            known.executor = None if plan is None else Executor(plan, is_of_policy=True)
            known.failures += plan is None
        elif followed is not None and followed is known.executor and (followed.differences or followed.has_grown):
            known.executor = None
            known.failures += 1
