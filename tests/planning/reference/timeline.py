"""The readable form of csrc/planning/step_timeline.h: predicts the Timeline of a plan point by point.

The order of what is done at a point, and the host lane, are explained there.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import replace

from tests.planning.reference.footprint import interval_bytes
from tests.planning.reference.recomputing import rewritten
from vdnn.planning.costs import LinkCosts
from vdnn.planning.footprint import absent_intervals, use_after
from vdnn.step.plan import Absence, Action, Plan, PlannedLifetime
from vdnn.step.recording import Lifetime, PointKind, Recording
from vdnn.step.timeline import Copy, Mark, Timeline, Track

# A step that the host bounds is as the one before it after a few steps.
_MOST_STEPS = 16


def timeline_of(recording: Recording, plan: Plan, costs: LinkCosts) -> Timeline:
    """`recording` is of the step without a plan."""
    recomputed = frozenset(index for index, one in enumerate(plan.lifetimes) if one.is_recomputed)
    followed = rewritten(recording, recomputed)

    def run(host: _Host | None) -> Timeline:
        return _Replay(followed, plan.lifetimes, costs, host).run()

    if followed.synchronizes:
        return run(_Host(0))
    ahead = run(None)
    if ahead.host_ns <= ahead.step_ns:
        return ahead
    lead_ns, timeline = 0, run(_Host(0))
    for _ in range(_MOST_STEPS):
        later_ns = lead_ns + timeline.step_ns - timeline.host_ns
        if later_ns == lead_ns:
            break
        lead_ns, timeline = later_ns, run(_Host(-later_ns))
    return replace(timeline, step_ns=timeline.host_ns)


class _Storage:
    """The state of a lifetime that the plan offloads, during the replay."""

    def __init__(self, index: int, lifetime: Lifetime) -> None:
        self.index = index
        self.lifetime = lifetime
        self.copied_ns: int | None = None  # when the copy to the host is complete; None: not issued
        self.is_copy_waited_for = False  # the copy to the host
        self.is_released = False  # by the plan; others may still hold it
        self.reload_ns: int | None = None  # when the reload is complete; None: not issued
        self.is_reload_waited_for = False

    def is_on_device(self, point: int) -> bool:
        return not self.is_released or point < self.lifetime.free_point


class _Host:
    """The host during the replay. `now_ns`: the time at which it has issued everything so far; negative if it is ahead
    of the device."""

    def __init__(self, now_ns: int) -> None:
        self.now_ns = now_ns


class _Replay:
    """One step. Without a host, the host is as far ahead as needed."""

    def __init__(
        self, recording: Recording, planned: Sequence[PlannedLifetime], costs: LinkCosts, host: _Host | None
    ) -> None:
        self._recording = recording
        self._planned = planned
        self._link = LinkClock(costs)
        self._copy_issue_ns = costs.issue_ns
        self._host = host
        self._now_ns = 0
        self._copies: list[Copy] = []
        self._storages: dict[int, _Storage] = {}
        self._copies_at: defaultdict[int, list[_Storage]] = defaultdict(list)
        self._ends_at: defaultdict[int, list[_Storage]] = defaultdict(list)
        self._releases_at: defaultdict[int, list[_Storage]] = defaultdict(list)
        self._reloads_at: defaultdict[int, list[_Storage]] = defaultdict(list)
        for index, (lifetime, plan) in enumerate(zip(recording.lifetimes, planned, strict=True)):
            if plan.action is not Action.OFFLOAD:
                continue
            storage = self._storages[index] = _Storage(index, lifetime)
            self._copies_at[lifetime.copy_point].append(storage)
            self._ends_at[lifetime.end_point].append(storage)
            for absence in plan.absences:
                self._releases_at[absence.release_point].append(storage)
                if absence.reload_point is not None:
                    self._reloads_at[absence.reload_point].append(storage)
        end = len(recording.points)
        for point, storages in self._reloads_at.items():  # reloads of one point are issued in the order of their uses
            storages.sort(key=lambda one: (use_after(one.lifetime, point) or end, one.index))

    def run(self) -> Timeline:
        memory = _Memory(self._recording, self._planned)
        marks = []
        for index, point in enumerate(self._recording.points):
            self._now_ns += point.compute_ns
            host_stall_ns = 0
            if self._host is not None:
                self._host.now_ns += point.issue_ns
                host_stall_ns = self._wait_until(self._host.now_ns)
            begin_ns = self._now_ns
            for storage in self._ends_at.pop(index, ()):
                self._end(storage)
            reload_stall_ns = 0
            if point.kind is not PointKind.END:
                for storage in self._copies_at.pop(index, ()):
                    self._copy_out(storage)
                used = self._storages.get(-1 if point.lifetime is None else point.lifetime)
                if point.kind is PointKind.USE and used is not None:
                    reload_stall_ns = self._use(used, index)
                for storage in self._releases_at.pop(index, ()):
                    self._release(storage)
                for storage in self._reloads_at.pop(index, ()):
                    self._reload_early(storage, index)
            stalled_ns = self._now_ns - begin_ns
            stalls = stalled_ns - reload_stall_ns, reload_stall_ns
            marks.append(Mark(index, begin_ns, self._now_ns, *stalls, *memory.at(index), host_stall_ns))
        host_ns = self._recording.issue_ns + self._copy_issue_ns * len(self._copies)
        return Timeline("predicted", self._recording.clock, self._now_ns, tuple(marks), tuple(self._copies), host_ns)

    def _wait_until(self, time_ns: int) -> int:
        stalled_ns = max(0, time_ns - self._now_ns)
        self._now_ns += stalled_ns
        return stalled_ns

    def _copy(self, track: Track, storage: _Storage, ready_ns: int) -> int:
        nbytes = storage.lifetime.nbytes
        if self._host is not None:
            self._host.now_ns += self._copy_issue_ns
            ready_ns = max(ready_ns, self._host.now_ns)
        begin_ns, end_ns = self._link.copy(track, nbytes, ready_ns)
        self._copies.append(Copy(track, storage.index, nbytes, begin_ns, end_ns))
        return end_ns

    def _copy_out(self, storage: _Storage) -> None:
        storage.copied_ns = self._copy(Track.TO_HOST, storage, self._now_ns)

    def _copy_back(self, storage: _Storage) -> int:
        if storage.copied_ns is None:
            raise RuntimeError(f"simulate: storage {storage.index} is reloaded before its copy to the host was issued")
        storage.reload_ns = self._copy(Track.TO_DEVICE, storage, max(self._now_ns, storage.copied_ns))
        return storage.reload_ns

    def _release(self, storage: _Storage) -> None:
        if storage.is_reload_waited_for:
            storage.reload_ns, storage.is_reload_waited_for = None, False
        if storage.copied_ns is not None and not storage.is_released:
            self._wait_for_copy_out(storage)
            storage.is_released = True

    def _wait_for_copy_out(self, storage: _Storage) -> None:
        if storage.copied_ns is not None and not storage.is_copy_waited_for:
            self._wait_until(storage.copied_ns)
            storage.is_copy_waited_for = True

    def _reload_early(self, storage: _Storage, point: int) -> None:
        if not storage.is_on_device(point) and storage.reload_ns is None:
            self._copy_back(storage)

    def _use(self, storage: _Storage, point: int) -> int:
        if storage.is_on_device(point):
            return 0
        reload_ns = self._copy_back(storage) if storage.reload_ns is None else storage.reload_ns
        if storage.is_reload_waited_for:
            return 0
        storage.is_reload_waited_for = True
        return self._wait_until(reload_ns)

    def _end(self, storage: _Storage) -> None:
        """The graph releases the storage. Its memory is returned once copies in flight are complete."""
        self._wait_for_copy_out(storage)
        if storage.reload_ns is not None and not storage.is_reload_waited_for:
            self._wait_until(storage.reload_ns)


class _Memory:
    """Allocated and peak bytes at every point of the replay."""

    def __init__(self, recording: Recording, planned: Sequence[PlannedLifetime]) -> None:
        self._recording = recording
        self._peaks = interval_bytes(recording, planned)
        count = len(recording.points)
        change = [0] * (count + 2)  # of the absent bytes, from one interval to the next
        self._released = [0] * count  # bytes that a release at a point frees at once
        self._reloaded = [0] * count  # bytes that the plan reloads at a point, after the releases
        for lifetime, plan in zip(recording.lifetimes, planned, strict=True):
            for absence, intervals in _absences(lifetime, plan):
                change[intervals.start] += lifetime.nbytes
                change[intervals.stop] -= lifetime.nbytes
                if intervals.start == absence.release_point + 1:
                    self._released[absence.release_point] += lifetime.nbytes
                if absence.reload_point is not None and absence.reload_point == intervals.stop - 1 < lifetime.end_point:
                    self._reloaded[absence.reload_point] += lifetime.nbytes
        self._absent = list(itertools.accumulate(change))  # bytes, in the interval that ends at a point

    def at(self, point: int) -> tuple[int, int]:
        """Bytes allocated after the point, and the peak since after the previous point."""
        allocated = self._recording.points[point].allocated_bytes - self._absent[point + 1]
        # No more than the next peak: what ends at the point, and was absent, is not there behind it. The last has no
        # next one: storages that are absent at the end of the step are not reloaded.
        allocated = min(allocated, self._peaks[min(point + 1, len(self._peaks) - 1)])
        before_moves = allocated + self._released[point] - self._reloaded[point]
        return allocated, max(self._peaks[point], allocated, before_moves)


def _absences(lifetime: Lifetime, plan: PlannedLifetime) -> Iterator[tuple[Absence, range]]:
    for absence in plan.absences:
        intervals = absent_intervals(lifetime, absence)
        if intervals:
            yield absence, intervals


# The times of copies on two copy engines that share one link: the same arithmetic as the simulated device's clock.
#
# Each engine does one copy at a time, in the order of issue. When copies run in both directions at once, the one that
# was issued first keeps its rate, and the other gets the rest of the link's rate.

# A copy always keeps this part (1/16) of its own rate, even if the other direction takes the whole link.
_LEAST_SHARE = 16


class _Engine:
    def __init__(self, own_rate: float, other_rate: float, duplex_rate: float) -> None:
        self.alone = own_rate
        self.shared = min(max(duplex_rate - other_rate, own_rate / _LEAST_SHARE), own_rate)
        self.stream_ns = 0  # when the copy stream has finished its work
        self.free_ns = 0
        self.busy: deque[tuple[int, int]] = deque()


class LinkClock:
    """The link during one step. Both engines are idle when the step begins."""

    def __init__(self, costs: LinkCosts) -> None:
        out, back = costs.to_host_bytes_per_s, costs.to_device_bytes_per_s
        self._latency_ns = costs.latency_ns
        self._engines = {
            Track.TO_HOST: _Engine(out, back, costs.duplex_bytes_per_s),
            Track.TO_DEVICE: _Engine(back, out, costs.duplex_bytes_per_s),
        }

    def copy(self, track: Track, nbytes: int, ready_ns: int) -> tuple[int, int]:
        """Issues a copy that may begin at `ready_ns`. Returns when its stream reaches it, and when it is complete."""
        engine = self._engines[track]
        other = self._engines[Track.TO_DEVICE if track is Track.TO_HOST else Track.TO_HOST]
        reached_ns = max(engine.stream_ns, ready_ns)
        issue_ns = max(reached_ns, engine.free_ns)
        begin_ns = issue_ns + self._latency_ns
        end_ns = _end_of_copy(engine, other, begin_ns, nbytes)
        engine.busy.append((begin_ns, end_ns))
        engine.free_ns = engine.stream_ns = end_ns
        while other.busy and other.busy[0][1] <= issue_ns:
            other.busy.popleft()
        return reached_ns, end_ns


def _duration_ns(nbytes: float, rate: float) -> int:
    return math.ceil(nbytes / rate * 1e9)


def _end_of_copy(engine: _Engine, other: _Engine, begin_ns: int, nbytes: int) -> int:
    now, left = begin_ns, float(nbytes)
    for until, rate in _spans(engine, other, begin_ns):
        if left <= 0:
            break
        if until <= now:
            continue
        end = min(until, now + _duration_ns(left, rate))
        left = 0.0 if end < until else left - float(end - now) * rate / 1e9
        now = end
    return now + _duration_ns(left, engine.alone) if left > 0 else now


def _spans(engine: _Engine, other: _Engine, begin_ns: int) -> Iterator[tuple[int, float]]:
    """Times and the rate that holds up to each: alone before a copy of the other direction, shared during it."""
    for begin, end in other.busy:
        if end > begin_ns:
            yield begin, engine.alone
            yield end, engine.shared
