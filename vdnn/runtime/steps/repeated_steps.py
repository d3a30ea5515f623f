"""Steps that repeat what an online policy did in an earlier one, so that the native gate can serve them.

A repeatable policy decides alike in each step that saves and uses the same. So the first step of each kind is observed:
what was decided about each storage, and which reloads its uses issued ahead. This makes a plan that later steps of the
same size or a smaller one follow, point by point: at the first save or use that is not as observed, or is larger, the
policy and the lookahead go on, as in a step that follows nothing. Such a plan releases nothing. The window of the
transfer queue does, as in the observed step.

A step that begins larger is observed in its turn. One that saves the same and differs all the same is observed again, a
few times. The number of plans is bounded.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, field

from vdnn.runtime.steps.executor import Executor
from vdnn.runtime.steps.kinds import Kind, StepKinds
from vdnn.runtime.steps.save_keys import SaveKeys
from vdnn.runtime.storage.counters import Kept
from vdnn.step.plan import Absence, Action, Plan, PlannedLifetime, PlannedPoint
from vdnn.step.recording import PointKind, SaveKey

_MOST_REPEATED = 32  # kinds of steps
_MOST_FAILURES = 3  # plans of one kind from which a step differed; each step that repeats makes up for one


@dataclass(slots=True)
class _Observed:
    """A lifetime. `reason`: why it is kept. `reloads`: the points at which it was reloaded ahead of a use."""

    nbytes: int
    action: Action = Action.KEEP
    reason: Kept | None = None
    reloads: list[int] = field(default_factory=list)

    def planned(self, end: int) -> PlannedLifetime:
        """`end`: a point that no step reaches."""
        if self.action is not Action.OFFLOAD:
            return PlannedLifetime(self.nbytes, self.action)
        absences = tuple(Absence(point - 1, point) for point in self.reloads)
        # Not reloaded ahead: if it has left, its use reloads it.
        return PlannedLifetime(self.nbytes, self.action, absences or (Absence(end),))


class ObservedStep:
    """Notes the points of a step, what was decided about its storages, and the reloads ahead of their uses."""

    def __init__(self) -> None:
        self._points: list[PlannedPoint] = []
        self._lifetimes: list[_Observed] = []

    def begins(self, nbytes: int) -> int:
        """A storage is saved for the first time. Returns its lifetime in the plan."""
        self._lifetimes.append(_Observed(nbytes))
        return len(self._lifetimes) - 1

    def saved(self, lifetime: int, key: SaveKey) -> None:
        self._points.append(PlannedPoint(PointKind.SAVE, lifetime, key))

    def used(self, lifetime: int) -> None:
        self._points.append(PlannedPoint(PointKind.USE, lifetime, None))

    def decided(self, lifetime: int, action: Action, reason: Kept | None = None) -> None:
        """`reason`: why it is kept."""
        observed = self._lifetimes[lifetime]
        observed.action = action
        observed.reason = reason or observed.reason

    def reloaded_ahead(self, lifetime: int) -> None:
        self._lifetimes[lifetime].reloads.append(len(self._points) - 1)

    def executor(self, policy: str) -> Executor:
        """Repeats the step, which has ended."""
        end = PlannedPoint(PointKind.END, None, None)
        lifetimes = tuple(one.planned(len(self._points)) for one in self._lifetimes)
        kept = {number: one.reason for number, one in enumerate(self._lifetimes) if one.reason is not None}
        # Two ends, since a reload comes after its release.
        return Executor(Plan(policy, "", "", None, (*self._points, end, end), lifetimes), repeats=True, kept=kept)


@dataclass
class _RepeatedKind:
    """The steps of one kind. `elements`: of the first save of the step that `executor` repeats."""

    executor: Executor | None = None
    elements: int = 0
    failures: int = 0


class RepeatedSteps:
    """The steps of one session that are repeated, for the policy of this name."""

    def __init__(self, policy: str) -> None:
        self._policy = policy
        self._kinds = StepKinds()
        self._repeated: OrderedDict[Kind, _RepeatedKind] = OrderedDict()

    def choose(self, keys: SaveKeys) -> tuple[Executor | None, ObservedStep | None]:
        """For the step of which `keys` has the first save: what repeats the step that is expected, or what observes it.
        Neither if steps like it went differently each time."""
        first, begin = keys.first, keys.begin
        kind = None if begin is None else self._kinds.expected(begin)
        known = None if kind is None else self._repeated.get(kind)
        if first is None or known is None or (known.executor is not None and _elements_of(first) > known.elements):
            return None, ObservedStep()
        if known.executor is None:
            return None, ObservedStep() if known.failures < _MOST_FAILURES else None
        return known.executor, None

    def ended(self, keys: SaveKeys, executor: Executor | None, observed: ObservedStep | None) -> None:
        """Called when a step has ended, with what `choose` returned for it. `observed` None: it was not a whole
        step."""
        first, begin, kind = keys.first, keys.begin, keys.kind
        if first is None or begin is None:
            return
        self._kinds.ended(begin, kind)
        if executor is None and observed is None:
            return
        known = self._repeated.setdefault(kind, _RepeatedKind())
        self._repeated.move_to_end(kind)
        if observed is not None:
            known.executor, known.elements = observed.executor(self._policy), _elements_of(first)
        elif known.executor is not executor:  # a step of another kind was expected
            return
        elif executor is not None and executor.differences:
            known.executor = None
            known.failures += 1
        else:
            known.failures = max(0, known.failures - 1)
        while len(self._repeated) > _MOST_REPEATED:
            self._repeated.popitem(last=False)


def _elements_of(first: SaveKey) -> int:
    return math.prod(first.size)
