"""The Timeline that a plan will have: the step replayed point by point, with both copy engines and every stall.

It follows the runtime's order of calls. At a point, in this order: the copies out that may begin there; at a use the
wait for its copy back, issued there if it was not before; then the plan's releases, each of which waits for its copy
out, and the plan's reloads, what is used first first.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence

from vdnn.errors import VdnnError
from vdnn.planning.costs import LinkCosts
from vdnn.planning.footprint import absent_intervals, interval_bytes, use_after
from vdnn.planning.link_clock import LinkClock
from vdnn.planning.recomputing import recording_under
from vdnn.step.plan import Absence, Action, Plan, PlannedLifetime
from vdnn.step.recording import Lifetime, PointKind, Recording
from vdnn.step.timeline import Copy, Mark, Timeline, Track


def simulate(recording: Recording, plan: Plan, costs: LinkCosts) -> Timeline:
    """Raises VdnnError if the plan is for another step. The recording is that of the step without any plan."""
    followed = recording_under(recording, plan.lifetimes)
    require_plan_of(followed, plan)
    return _Replay(followed, plan.lifetimes, costs).run()


def require_plan_of(recording: Recording, plan: Plan) -> None:
    places = [(point.kind, point.lifetime) for point in recording.points]
    sizes = [lifetime.nbytes for lifetime in recording.lifetimes]
    if places != [(point.kind, point.lifetime) for point in plan.points] or sizes != [
        planned.nbytes for planned in plan.lifetimes
    ]:
        raise VdnnError(
            f"plan: made by {plan.policy!r} for another step: it has {len(plan.points)} points and "
            f"{len(plan.lifetimes)} storages, the recording {len(places)} and {len(sizes)}."
        )


class _Storage:
    """A lifetime that the plan moves, as the replay finds it."""

    def __init__(self, index: int, lifetime: Lifetime) -> None:
        self.index = index
        self.lifetime = lifetime
        self.copied_ns: int | None = None  # when the copy out is done
        self.is_waited_for = False  # of the copy out
        self.is_given_up = False  # by the plan; others may hold it still
        self.reload_ns: int | None = None  # when the copy back is done, of one that is issued or was waited for
        self.is_back = False  # waited for

    def is_on_device(self, point: int) -> bool:
        return not self.is_given_up or point < self.lifetime.free_point


class _Replay:
    def __init__(self, recording: Recording, planned: Sequence[PlannedLifetime], costs: LinkCosts) -> None:
        self._recording = recording
        self._planned = planned
        self._link = LinkClock(costs)
        self._now_ns = 0
        self._copies: list[Copy] = []
        self._storages: dict[int, _Storage] = {}
        self._to_copy: defaultdict[int, list[_Storage]] = defaultdict(list)
        self._to_end: defaultdict[int, list[_Storage]] = defaultdict(list)
        self._releases: defaultdict[int, list[_Storage]] = defaultdict(list)
        self._reloads: defaultdict[int, list[_Storage]] = defaultdict(list)
        for index, (lifetime, plan) in enumerate(zip(recording.lifetimes, planned, strict=True)):
            if plan.action is not Action.OFFLOAD:
                continue
            storage = self._storages[index] = _Storage(index, lifetime)
            self._to_copy[lifetime.copy_point].append(storage)
            self._to_end[lifetime.end_point].append(storage)
            for absence in plan.absences:
                self._releases[absence.release_point].append(storage)
                if absence.reload_point is not None:
                    self._reloads[absence.reload_point].append(storage)
        end = len(recording.points)
        for point, storages in self._reloads.items():  # of those at one point what is used first goes first
            storages.sort(key=lambda one: (use_after(one.lifetime, point) or end, one.index))

    def run(self) -> Timeline:
        memory = _Memory(self._recording, self._planned)
        marks = []
        for index, point in enumerate(self._recording.points):
            self._now_ns += point.compute_ns
            begin_ns = self._now_ns
            for storage in self._to_end.pop(index, ()):
                self._ended(storage)
            reload_stall_ns = 0
            if point.kind is not PointKind.END:
                for storage in self._to_copy.pop(index, ()):
                    self._copy_out(storage)
                used = self._storages.get(-1 if point.lifetime is None else point.lifetime)
                if point.kind is PointKind.USE and used is not None:
                    reload_stall_ns = self._use(used, index)
                for storage in self._releases.pop(index, ()):
                    self._release(storage)
                for storage in self._reloads.pop(index, ()):
                    self._reload_early(storage, index)
            stalled_ns = self._now_ns - begin_ns
            stalls = stalled_ns - reload_stall_ns, reload_stall_ns
            marks.append(Mark(index, begin_ns, self._now_ns, *stalls, *memory.at(index)))
        return Timeline("predicted", self._recording.clock, self._now_ns, tuple(marks), tuple(self._copies))

    def _wait_until(self, time_ns: int) -> int:
        stalled_ns = max(0, time_ns - self._now_ns)
        self._now_ns += stalled_ns
        return stalled_ns

    def _copy(self, track: Track, storage: _Storage, ready_ns: int) -> int:
        nbytes = storage.lifetime.nbytes
        begin_ns, end_ns = self._link.copy(track, nbytes, ready_ns)
        self._copies.append(Copy(track, storage.index, nbytes, begin_ns, end_ns))
        return end_ns

    def _copy_out(self, storage: _Storage) -> None:
        storage.copied_ns = self._copy(Track.TO_HOST, storage, self._now_ns)

    def _copy_back(self, storage: _Storage) -> None:
        assert storage.copied_ns is not None, "it is on the host"
        storage.reload_ns = self._copy(Track.TO_DEVICE, storage, max(self._now_ns, storage.copied_ns))

    def _release(self, storage: _Storage) -> None:
        if storage.is_back:
            storage.reload_ns, storage.is_back = None, False
        if storage.copied_ns is not None and not storage.is_given_up:
            self._wait_for_copy_out(storage)
            storage.is_given_up = True

    def _wait_for_copy_out(self, storage: _Storage) -> None:
        if storage.copied_ns is not None and not storage.is_waited_for:
            self._wait_until(storage.copied_ns)
            storage.is_waited_for = True

    def _reload_early(self, storage: _Storage, point: int) -> None:
        if not storage.is_on_device(point) and storage.reload_ns is None:
            self._copy_back(storage)

    def _use(self, storage: _Storage, point: int) -> int:
        if storage.is_on_device(point):
            return 0
        if storage.reload_ns is None:
            self._copy_back(storage)
        assert storage.reload_ns is not None, "issued now or before"
        if storage.is_back:
            return 0
        storage.is_back = True
        return self._wait_until(storage.reload_ns)

    def _ended(self, storage: _Storage) -> None:
        """The graph lets go of what is in flight: its memory goes back behind the copy."""
        self._wait_for_copy_out(storage)
        if storage.reload_ns is not None and not storage.is_back:
            self._wait_until(storage.reload_ns)


class _Memory:
    """Bytes at every point of the replay."""

    def __init__(self, recording: Recording, planned: Sequence[PlannedLifetime]) -> None:
        self._recording = recording
        self._peaks = interval_bytes(recording, planned)
        count = len(recording.points)
        change = [0] * (count + 2)  # of what is absent, from one interval to the next
        self._released = [0] * count  # of it, given up at a point and gone at once
        self._reloaded = [0] * count  # brought back by the plan, behind the releases
        for lifetime, plan in zip(recording.lifetimes, planned, strict=True):
            for absence, away in _absences(lifetime, plan):
                change[away.start] += lifetime.nbytes
                change[away.stop] -= lifetime.nbytes
                if away.start == absence.release_point + 1:
                    self._released[absence.release_point] += lifetime.nbytes
                if absence.reload_point is not None and absence.reload_point == away.stop - 1 < lifetime.end_point:
                    self._reloaded[absence.reload_point] += lifetime.nbytes
        self._absent = list(itertools.accumulate(change))  # in the interval that ends at a point

    def at(self, point: int) -> tuple[int, int]:
        """Allocated when the point was left, and the highest since the one before was."""
        left = self._recording.points[point].allocated_bytes - self._absent[point + 1]
        if point == len(self._peaks) - 1:
            left = min(left, self._peaks[point])  # what outlives the step, and is away at its end, does not come back
        before_moves = left + self._released[point] - self._reloaded[point]
        return left, max(self._peaks[point], left, before_moves)


def _absences(lifetime: Lifetime, plan: PlannedLifetime) -> Iterator[tuple[Absence, range]]:
    for absence in plan.absences:
        away = absent_intervals(lifetime, absence)
        if away:
            yield absence, away
