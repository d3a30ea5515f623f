"""Follows a Plan through a step: decides which saves are offloaded, and issues releases and reloads at their points.

The executor finds a save in the plan by its form, so a save more or less does not shift the later ones, and a plan
serves steps of smaller shapes: at each point they take no more. Saves that are a little larger than planned are treated
as planned; a guard makes up for the difference. From the first one that is far larger on, no save follows the plan.
A plan that repeats an earlier step is followed up to the first point that differs.
Saves that are not in the plan are left to the online policy. A point that the step skipped (a branch that did not run)
counts as reached as soon as a later point is reached.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Mapping
from enum import Enum
from typing import NamedTuple

from vdnn.runtime.storage.counters import Kept
from vdnn.runtime.storage.managed_storage import ManagedStorage
from vdnn.step.forms import Form, Forms, without_numbers
from vdnn.step.plan import Action, Plan
from vdnn.step.recording import PointKind, SaveKey
from vdnn.user_warnings import warn

logger = logging.getLogger("vdnn")

# The number of planned saves among which a save is looked for.
_REACH = 256
# Operations that save this many saves before or after another one take transient bytes at nearly the same time.
NEARBY = 8
# A storage that leaves the device has to be released this many points before the plan needs its memory.
_AHEAD = 4
# A step has outgrown its plan with a save this many times as large as the largest one that the plan has nearby.
_FAR = 2


class MoveKind(Enum):
    RELEASE = "release"
    RELOAD = "reload"


PlannedMove = tuple[int, MoveKind]  # of a lifetime of the plan


class EncodedSave(NamedTuple):
    """Encoded bytes, which are a save of the plan and none of the program."""

    key: SaveKey
    planned: int  # the lifetime in the plan


class Occupancy:
    """The bytes that a plan takes on the device at each point: `stored` in saved storages, `kept` in those that it
    keeps. `peaks` has the peak until then. `spare` is how much less than at its peak the plan takes at a point and soon
    after it, `transient` what operations take there besides saved storages."""

    def __init__(self, stored: list[int], kept: list[int], peaks: list[int]) -> None:
        highest = max(peaks)
        self.stored = stored
        self.kept = kept
        others = [peak - now for peak, now in zip(peaks, stored, strict=True)]
        least = min(others)
        self.transient = [max(others[point : point + 1 + _AHEAD]) - least for point in range(len(others))]
        self.spare = [highest - max(peaks[point : point + 1 + _AHEAD]) for point in range(len(peaks))]


class _PlannedSave(NamedTuple):
    point: int
    lifetime: int
    key: SaveKey
    form: Form
    is_first: bool  # of its lifetime


class Executor:
    """Follows one plan, step after step. `is_given`: the plan is the user's, who is warned of a step that differs. A
    plan that vdnn made leaves a line in the log. `repeats`: the plan is an earlier step, see repeated_steps.py, and
    `kept` has the reasons for which it kept lifetimes."""

    def __init__(
        self,
        plan: Plan,
        occupancy: Occupancy | None = None,
        *,
        is_given: bool = False,
        repeats: bool = False,
        kept: Mapping[int, Kept] | None = None,
    ) -> None:
        self.plan = plan
        self.repeats = repeats
        self._kept = kept or {}
        self.recomputes = any(one.is_recomputed for one in plan.lifetimes)
        self.keeps_everything = all(one.action is Action.KEEP for one in plan.lifetimes)
        self._occupancy = occupancy
        self._most_transient_bytes = 0 if occupancy is None else max(occupancy.transient, default=0)
        self._is_given = is_given
        self.checked_steps = 0  # steps that followed it and were measured
        self.checked_bytes = 0  # the highest peak of those
        self.differences = 0  # saves of this step that differ from the plan
        self.first_difference: str | None = None
        self._has_warned = False
        self.has_grown = False  # a save of this step is larger than planned
        self.is_outgrown = False  # a save of this step is far larger, or the step does not repeat
        forms, first_saves = Forms(), dict[int, int]()
        self.saves = [
            _PlannedSave(
                index,
                point.lifetime,
                point.key,
                forms.of(point.key),
                first_saves.setdefault(point.lifetime, index) == index,
            )
            for index, point in enumerate(plan.points)
            if point.kind is PointKind.SAVE and point.lifetime is not None and point.key is not None
        ]
        sizes = [plan.lifetimes[one.lifetime].nbytes for one in self.saves]
        self._largest_bytes = max(sizes, default=0)
        self._bytes_nearby = [max(sizes[max(0, at - NEARBY) : at + NEARBY + 1]) for at in range(len(sizes))]
        self._use_points: list[list[int]] = [[] for _ in plan.lifetimes]
        for index, point in enumerate(plan.points):
            if point.kind is PointKind.USE and point.lifetime is not None:
                self._use_points[point.lifetime].append(index)
        self._moves = sorted(
            (
                (point, move.value, lifetime, move)
                for lifetime, planned in enumerate(plan.lifetimes)
                for absence in planned.absences
                for move, point in ((MoveKind.RELEASE, absence.release_point), (MoveKind.RELOAD, absence.reload_point))
                if point is not None and not (repeats and move is MoveKind.RELEASE)
            ),
            # At one point: releases first, because they make room, then reloads, in the order of their uses.
            key=lambda one: (one[0], one[3] is MoveKind.RELOAD, self._next_use(one[2], one[0]), one[2]),
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
        self._waiting: list[PlannedMove] = []  # reloads for which there was no room
        self._is_lost = False  # the last save was not found nearby
        self._reached = -1
        self._managed: list[weakref.ref[ManagedStorage] | None] = [None] * len(self.plan.lifetimes)
        self._uses = [0] * len(self.plan.lifetimes)
        self.differences = 0
        self.has_grown = self.is_outgrown = False

    # Called in the hooks.

    def saved(self, managed: ManagedStorage, key: SaveKey, form: Form, is_new: bool) -> int | None:
        """The planned lifetime that this save begins; None if it begins none or is not in the plan."""
        if self.repeats:
            return self._repeated_save(managed, form, is_new)
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
        self.is_outgrown = managed.nbytes > _FAR * self.bytes_nearby
        if self._managed[lifetime] is not None or (has_grown and self._occupancy is None):
            self._differs(f"found another storage of {managed.nbytes} bytes at {key}", index)
        if self._managed[lifetime] is not None or self.is_outgrown:
            return None
        self._managed[lifetime] = weakref.ref(managed)
        return lifetime

    def _repeated_save(self, managed: ManagedStorage, form: Form, is_new: bool) -> int | None:
        planned = self.saves[self._next_save] if self._next_save < len(self.saves) else None
        watched = managed.watched
        if (
            planned is None
            or planned.form != form
            or planned.point != self._reached + 1
            or planned.is_first is not is_new
            or self.plan.lifetimes[planned.lifetime].nbytes < managed.nbytes
            or not (is_new or (watched is not None and watched.planned == planned.lifetime))
        ):
            self._no_longer_repeats()
            return None
        self._next_save += 1
        self._reached = planned.point
        if not is_new:
            return None
        self._managed[planned.lifetime] = managed.reference
        return planned.lifetime

    def _no_longer_repeats(self) -> None:
        """Something in this step is not as in the one that the plan repeats."""
        self.differences += 1
        self.is_outgrown = True

    def kept_for(self, lifetime: int) -> Kept:
        """The reason for which the plan keeps a lifetime."""
        return self._kept.get(lifetime, Kept.POLICY if self.repeats else Kept.PLAN)

    def _find(self, form: Form) -> int | None:
        end = min(self._next_save + _REACH, len(self.saves))
        found = next((index for index in range(self._next_save, end) if self.saves[index].form == form), None)
        # A save that is too small at most sizes may be another one of its form. Two that agree skip a part of the plan.
        is_far = found is not None and found - self._next_save > NEARBY
        was_lost, self._is_lost = self._is_lost, found is None or is_far
        return found if was_lost or not is_far else None

    def recomputes_like(self, form: Form) -> bool:
        """True if the plan recomputes the save that is nearest to this one, of those that differ from it in numbers
        only: the same operation of another layer or expert."""
        alike = None if self._is_given else self._alike.get(without_numbers(form))
        if not alike:
            return False
        nearest = min(alike, key=lambda index: abs(index - self._next_save))
        return self.plan.lifetimes[self.saves[nearest].lifetime].action is Action.RECOMPUTE

    def bytes_like(self, form: Form) -> int:
        """The largest planned storage of a save that differs from this one in numbers only; 0 if there is none."""
        alike = self._alike.get(without_numbers(form), ())
        return max((self.plan.lifetimes[self.saves[index].lifetime].nbytes for index in alike), default=0)

    @functools.cached_property
    def _alike(self) -> dict[tuple[object, ...], list[int]]:
        """The planned saves by their forms without numbers."""
        alike: dict[tuple[object, ...], list[int]] = {}
        for index, one in enumerate(self.saves):
            alike.setdefault(without_numbers(one.form), []).append(index)
        return alike

    def not_recomputed(self, managed: ManagedStorage) -> None:
        if self.repeats:
            self._no_longer_repeats()
            return
        self._differs(f"{managed.nbytes} bytes that the plan recomputes cannot be recomputed here", self._next_save - 1)

    def used(self, lifetime: int) -> None:
        points = self._use_points[lifetime]
        use = self._uses[lifetime]
        self._uses[lifetime] += 1
        if self.repeats:
            if use < len(points) and points[use] == self._reached + 1:
                self._reached += 1
            else:
                self._no_longer_repeats()
        elif points:
            self._reached = max(self._reached, points[min(use, len(points) - 1)])

    @property
    def stored_bytes(self) -> int:
        """The bytes of saved storages that the plan has on the device now."""
        occupancy = self._occupancy
        return 0 if occupancy is None or self._reached < 0 else occupancy.stored[self._reached]

    @property
    def kept_bytes(self) -> int:
        """The part of them that stays until its use."""
        occupancy = self._occupancy
        return 0 if occupancy is None or self._reached < 0 else occupancy.kept[self._reached]

    @property
    def transient_bytes(self) -> int:
        """The bytes that operations of the plan take besides saved storages, now and soon."""
        return 0 if self._occupancy is None else self._occupancy.transient[max(0, self._reached)]

    @property
    def is_past_saves(self) -> bool:
        """True if the step has passed all saves of the plan."""
        return self._next_save >= len(self.saves)

    @property
    def more_transient_bytes(self) -> int:
        """The most bytes that an operation of the plan allocates with its save, beyond `transient_bytes`."""
        if self._occupancy is None:
            return 0
        return self._most_transient_bytes + self._largest_bytes - self.transient_bytes

    @property
    def spare_bytes(self) -> int:
        """How much less than at its peak the plan takes now and soon."""
        return self._spare_bytes(max(0, self._reached))

    @property
    def spare_bytes_nearby(self) -> int:
        """How many bytes below its peak the plan is at this point, and when it uses the saves of this point."""
        lifetime = self.saves[max(0, self._next_save - 1)].lifetime
        return min(map(self._spare_bytes, (max(0, self._reached), *self._use_points[lifetime])))

    @property
    def last_bytes(self) -> int:
        """The planned bytes of the last save that the plan knows."""
        return self.plan.lifetimes[self.saves[max(0, self._next_save - 1)].lifetime].nbytes

    @property
    def bytes_nearby(self) -> int:
        """The largest storage that the plan saves before or after this save."""
        return self._bytes_nearby[max(0, self._next_save - 1)]

    def _spare_bytes(self, point: int) -> int:
        return 0 if self._occupancy is None else self._occupancy.spare[point]

    def make_moves(self, has_room: Callable[[int], bool] = lambda _: True) -> list[ManagedStorage]:
        """Issues all releases and reloads up to the point that the step has reached. Returns the released storages. A
        reload waits until there is room for it; its use reloads it if there is none."""
        released = []
        due = self._waiting
        while self._next_move < len(self._moves) and self._moves[self._next_move][0] <= self._reached:
            _, _, lifetime, move = self._moves[self._next_move]
            due.append((lifetime, move))
            self._next_move += 1
        self._waiting = []
        for lifetime, move in due:
            reference = self._managed[lifetime]
            managed = None if reference is None else reference()
            if managed is None:
                continue
            if move is MoveKind.RELEASE:
                managed.release()
                released.append(managed)
            elif self.is_outgrown:  # there may be no room: the lookahead reloads as much as its window takes
                continue
            elif not self.has_grown or has_room(managed.nbytes):
                managed.reload_early()
            else:
                self._waiting.append((lifetime, move))
        return released

    # Called in a settled step, in place of the hooks above.

    def moves_since(self, first: int) -> tuple[tuple[PlannedMove, ...], int]:
        """The moves that came due since the first ones, and the number of all that came due."""
        due = self._moves[first : self._next_move]
        return tuple((lifetime, move) for _, _, lifetime, move in due), self._next_move

    def follow(self, lifetime: int, managed: ManagedStorage) -> None:
        """From now on this lifetime of the plan is `managed`."""
        self._managed[lifetime] = managed.reference

    def make_planned(self, moves: tuple[PlannedMove, ...]) -> None:
        """Issues these moves."""
        for lifetime, move in moves:
            reference = self._managed[lifetime]
            managed = None if reference is None else reference()
            if managed is None:
                continue
            if move is MoveKind.RELEASE:
                managed.release()
            else:
                managed.reload_early()

    def followed(self, lifetime: int | None) -> ManagedStorage | None:
        """The storage that is this lifetime of the plan."""
        reference = None if lifetime is None else self._managed[lifetime]
        return None if reference is None else reference()

    def pass_save(self, form: Form) -> None:
        """The step has passed this save, which was as planned."""
        index = self._find(form)
        if index is not None:
            self._next_save = index + 1
            self._reached = max(self._reached, self.saves[index].point)

    def pass_moves(self) -> None:
        """The moves up to the point that the step has reached were issued."""
        while self._next_move < len(self._moves) and self._moves[self._next_move][0] <= self._reached:
            self._next_move += 1

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
