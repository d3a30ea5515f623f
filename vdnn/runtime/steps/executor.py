"""Follows a Plan through a step: what leaves, when it is given up, when it is asked back.

A save is recognised by its key, so that one more or less does not shift those behind it. What the plan does not know is
left to the online policy. A point of the plan that was passed over (a branch that never ran) counts as reached as soon
as a later one is.
"""

from __future__ import annotations

import logging
import weakref
from enum import Enum

from vdnn.runtime.storage.managed_storage import ManagedStorage
from vdnn.step.plan import Plan
from vdnn.step.recording import PointKind, SaveKey

logger = logging.getLogger("vdnn")

# How far ahead a save is looked for before it counts as unknown.
_REACH = 256


class _Move(Enum):
    RELEASE = "release"
    RELOAD = "reload"


class Executor:
    """Of one plan, step after step."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.differences = 0  # saves that were not as planned, in this step
        self.first_difference: str | None = None
        self._has_warned = False
        self._save_points = [index for index, point in enumerate(plan.points) if point.kind is PointKind.SAVE]
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
            # At one point: first what makes room, then what needs it, and of that what is used first.
            key=lambda one: (one[0], one[3] is _Move.RELOAD, self._next_use(one[2], one[0]), one[2]),
        )
        self.begin_step()

    @property
    def first_key(self) -> SaveKey | None:
        return self.plan.points[self._save_points[0]].key if self._save_points else None

    def _next_use(self, lifetime: int, point: int) -> int:
        return next((use for use in self._use_points[lifetime] if use > point), len(self.plan.points))

    def begin_step(self) -> None:
        self._next_save = 0  # index into the save points
        self._next_move = 0
        self._reached = -1
        self._managed: list[weakref.ref[ManagedStorage] | None] = [None] * len(self.plan.lifetimes)
        self._uses = [0] * len(self.plan.lifetimes)
        self.differences = 0

    # At the hooks.

    def saved(self, managed: ManagedStorage, key: SaveKey, is_new: bool) -> int | None:
        """The lifetime of the plan that this save begins or belongs to; None if it is not in the plan."""
        place = self._find(key)
        if place is None:
            self._differs(f"a save that is not in the plan: {key}", self._next_save)
            return None
        if place > self._next_save:
            self._differs(f"the next save it finds is {key}", self._next_save)
        self._next_save = place + 1
        point = self._save_points[place]
        self._reached = max(self._reached, point)
        lifetime = self.plan.points[point].lifetime
        assert lifetime is not None, "a save has a lifetime"
        if not is_new:
            return None
        if self._managed[lifetime] is not None or self.plan.lifetimes[lifetime].nbytes != managed.nbytes:
            self._differs(f"another storage of {managed.nbytes} bytes at {key}", place)
            return None
        self._managed[lifetime] = weakref.ref(managed)
        return lifetime

    def _find(self, key: SaveKey) -> int | None:
        end = min(self._next_save + _REACH, len(self._save_points))
        for place in range(self._next_save, end):
            if self.plan.points[self._save_points[place]].key == key:
                return place
        return None

    def not_rebuilt(self, managed: ManagedStorage) -> None:
        self._differs(f"{managed.nbytes} bytes that the plan rebuilds cannot be rebuilt here", self._next_save - 1)

    def used(self, lifetime: int) -> None:
        points = self._use_points[lifetime]
        use = self._uses[lifetime]
        self._uses[lifetime] += 1
        if points:
            self._reached = max(self._reached, points[min(use, len(points) - 1)])

    def make_moves(self) -> None:
        """All releases and reloads up to the point that was reached."""
        while self._next_move < len(self._moves) and self._moves[self._next_move][0] <= self._reached:
            _, _, lifetime, move = self._moves[self._next_move]
            self._next_move += 1
            reference = self._managed[lifetime]
            managed = None if reference is None else reference()
            if managed is None:
                continue
            if move is _Move.RELEASE:
                managed.release()
            else:
                managed.reload_early()

    # Differences.

    def _differs(self, found: str, place: int) -> None:
        self.differences += 1
        if self._has_warned:
            return
        self._has_warned = True
        if place < len(self._save_points):
            expected = str(self.plan.points[self._save_points[place]].key)
        else:
            expected = f"no save after the {len(self._save_points)} it has"
        self.first_difference = (
            f"the step differs from the plan (made by {self.plan.policy!r} for {self.plan.backend} on "
            f"{self.plan.device_name}): at save {place} it expects {expected}; {found}."
        )
        logger.warning("vdnn: %s What differs is left to the online policy.", self.first_difference)
