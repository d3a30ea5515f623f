"""Follows a Plan through a step: decides which saves are offloaded, and issues releases and reloads at their points.

The executor finds a save in the plan by its form, so a save more or less does not shift the later ones, and a plan
serves steps of smaller shapes: at each point they take no more. Saves that are not in the plan are left to the online
policy, and from the first one that is larger than planned on, all are. A point that the step skipped (a branch that did
not run) counts as reached as soon as a later point is reached.
"""

from __future__ import annotations

import logging
import weakref
from enum import Enum
from typing import NamedTuple

from vdnn.runtime.storage.managed_storage import ManagedStorage
from vdnn.step.forms import Form, Forms
from vdnn.step.plan import Plan
from vdnn.step.recording import PointKind, SaveKey
from vdnn.user_warnings import warn

logger = logging.getLogger("vdnn")

# The number of planned saves among which a save is looked for.
_REACH = 256


class _Move(Enum):
    RELEASE = "release"
    RELOAD = "reload"


class _PlannedSave(NamedTuple):
    point: int
    lifetime: int
    key: SaveKey
    form: Form


class Executor:
    """Follows one plan, step after step. `is_given`: the plan is the user's, who is warned of a step that differs. A
    plan that vdnn made leaves a line in the log."""

    def __init__(self, plan: Plan, *, is_given: bool = False) -> None:
        self.plan = plan
        self._is_given = is_given
        self.differences = 0  # saves of this step that differ from the plan
        self.first_difference: str | None = None
        self._has_warned = False
        self.has_grown = False  # a save of this step is larger than planned
        forms = Forms()
        self.saves = [
            _PlannedSave(index, point.lifetime, point.key, forms.of(point.key))
            for index, point in enumerate(plan.points)
            if point.kind is PointKind.SAVE and point.lifetime is not None and point.key is not None
        ]
        self._use_points: list[list[int]] = [[] for _ in plan.lifetimes]
        for index, point in enumerate(plan.points):
            if point.kind is PointKind.USE and point.lifetime is not None:
                self._use_points[point.lifetime].append(index)
        self._moves = sorted(
            (
                (point, move.value, lifetime, move)
                for lifetime, planned in enumerate(plan.lifetimes)
                for absence in planned.absences
                for move, point in ((_Move.RELEASE, absence.release_point), (_Move.RELOAD, absence.reload_point))
                if point is not None
            ),
            # At one point: releases first, because they make room, then reloads, in the order of their uses.
            key=lambda one: (one[0], one[3] is _Move.RELOAD, self._next_use(one[2], one[0]), one[2]),
        )
        self.begin_step()

    @property
    def first_key(self) -> SaveKey | None:
        return self.saves[0].key if self.saves else None

    def _next_use(self, lifetime: int, point: int) -> int:
        return next((use for use in self._use_points[lifetime] if use > point), len(self.plan.points))

    def begin_step(self) -> None:
        self._next_save = 0  # index of a planned save
        self._next_move = 0
        self._reached = -1
        self._managed: list[weakref.ref[ManagedStorage] | None] = [None] * len(self.plan.lifetimes)
        self._uses = [0] * len(self.plan.lifetimes)
        self.differences = 0
        self.has_grown = False

    # Called in the hooks.

    def saved(self, managed: ManagedStorage, key: SaveKey, form: Form, is_new: bool) -> int | None:
        """The planned lifetime that this save begins; None if it begins none or is not in the plan."""
        index = self._find(form)
        if index is None:
            self._differs(f"found a save that is not in the plan: {key}", self._next_save)
            return None
        if index > self._next_save:
            self._differs(f"found the later save {key}", self._next_save)
        self._next_save = index + 1
        planned = self.saves[index]
        self._reached = max(self._reached, planned.point)
        if not is_new:
            return None
        lifetime = planned.lifetime
        has_grown = self.plan.lifetimes[lifetime].nbytes < managed.nbytes
        self.has_grown |= has_grown
        if self._managed[lifetime] is not None or has_grown:
            self._differs(f"found another storage of {managed.nbytes} bytes at {key}", index)
            return None
        self._managed[lifetime] = weakref.ref(managed)
        return lifetime

    def _find(self, form: Form) -> int | None:
        end = min(self._next_save + _REACH, len(self.saves))
        for index in range(self._next_save, end):
            if self.saves[index].form == form:
                return index
        return None

    def not_recomputed(self, managed: ManagedStorage) -> None:
        self._differs(f"{managed.nbytes} bytes that the plan recomputes cannot be recomputed here", self._next_save - 1)

    def used(self, lifetime: int) -> None:
        points = self._use_points[lifetime]
        use = self._uses[lifetime]
        self._uses[lifetime] += 1
        if points:
            self._reached = max(self._reached, points[min(use, len(points) - 1)])

    def make_moves(self) -> None:
        """Issue all releases and reloads up to the point that the step has reached."""
        while self._next_move < len(self._moves) and self._moves[self._next_move][0] <= self._reached:
            _, _, lifetime, move = self._moves[self._next_move]
            self._next_move += 1
            reference = self._managed[lifetime]
            managed = None if reference is None else reference()
            if managed is None:
                continue
            if move is _Move.RELEASE:
                managed.release()
            elif not self.has_grown:  # else there may be no room: the lookahead reloads as much as its window takes
                managed.reload_early()

    # Differences between the step and the plan.

    def _differs(self, found: str, index: int) -> None:
        self.differences += 1
        if self._has_warned:
            return
        self._has_warned = True
        if index < len(self.saves):
            expected = str(self.saves[index].key)
        else:
            expected = f"no save after the {len(self.saves)} it has"
        self.first_difference = (
            f"the step differs from the plan (made by {self.plan.policy!r} for {self.plan.backend} on "
            f"{self.plan.device_name}): at save {index} it expects {expected}; {found}."
        )
        sentence = f"{self.first_difference} Saves that differ are left to the online policy."
        if self._is_given:
            warn(sentence)
        else:
            logger.warning("vdnn: %s", sentence)
