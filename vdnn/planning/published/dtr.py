"""dtr: when memory is short, what is cheap, large and long unused goes (Kirisame et al., ICLR 2021), foretold.

Dynamic tensor rematerialization as an online simulation over the recorded points. It knows nothing of what is to
come: wherever the step needs more than the budget, the storage with the least h = cost / (bytes x staleness) is
evicted, until it fits. Staleness is the time since its last access; its cost is that of its own rebuild and of those of
its evicted neighbourhood: all evicted storages that would have to be rebuilt for it, and all that are waiting for it.
An access to what is evicted rebuilds it and, before, what it is made from.

The plan rebuilds what was evicted. A plan rebuilds once: here what has come back is not evicted again, which DTR does,
and what DTR would do then at the least budgets cannot be planned. A plan gives up at once what it rebuilds, not only
when memory is short: the same time, and no more memory. Where evicting all that may go is not enough DTR runs out of
memory; the plan is what it had come to, over the budget.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from vdnn.planning.footprint import absent_intervals
from vdnn.planning.policies.plan_policy import PlanPolicy, PlanRequest
from vdnn.planning.policies.under_budget import budget_to_meet, keep_everything
from vdnn.planning.published.recomputed_steps import RebuiltSteps, plan_of_rebuilds
from vdnn.step.plan import Absence, Plan
from vdnn.step.recording import PointKind, Rebuild, Recording


class Dtr(PlanPolicy):
    """Its full heuristic, h_DTR. Of no budget: nothing is evicted."""

    @property
    def name(self) -> str:
        return "dtr"

    @property
    def source(self) -> str:
        return "DTR (Kirisame et al., ICLR 2021), its heuristic, each storage evicted once"

    def plan(self, request: PlanRequest) -> Plan:
        budget_bytes = budget_to_meet(request)
        if budget_bytes is None:
            return keep_everything(request, self.name)
        return plan_of_rebuilds(request, self.name, _Run(request.recording, budget_bytes).evicted_at_all())


class _Run:
    """Storages are "here", evicted, or back for good."""

    def __init__(self, recording: Recording, budget_bytes: int) -> None:
        self._recording = recording
        self._budget_bytes = budget_bytes
        self._rebuilds: dict[int, Rebuild] = {}
        self._readers: defaultdict[int, list[int]] = defaultdict(list)
        for index in RebuiltSteps(recording).candidates:
            rebuild = recording.lifetimes[index].rebuild
            assert rebuild is not None, "a candidate"
            self._rebuilds[index] = rebuild
            for source in rebuild.inputs:
                self._readers[source].append(index)
        self._now_ns = 0
        self._accessed_ns: dict[int, int] = {}
        self._evictable: set[int] = set()
        self._evicted: set[int] = set()
        self._back: set[int] = set()
        self._costs: dict[int, int] = {}  # with neighbourhoods, of what is evictable
        self._more = 0  # bytes above what is there with everything kept: those of rebuilds less those of evictions

    def evicted_at_all(self) -> set[int]:
        known = defaultdict(list)
        for index, rebuild in self._rebuilds.items():
            away = absent_intervals(self._recording.lifetimes[index], Absence(rebuild.known_point))
            known[away.start].append(index)
        for place, point in enumerate(self._recording.points):
            self._evictable.update(known.pop(place, ()))
            self._now_ns += point.compute_ns
            self._make_room(point.peak_bytes)
            if point.kind is PointKind.USE and point.lifetime is not None:
                self._rebuild(point.lifetime, point.allocated_bytes, locked=())
            if point.lifetime is not None:
                self._access(point.lifetime, is_save=point.kind is PointKind.SAVE)
            self._end(place)
        return self._evicted | self._back

    def _end(self, place: int) -> None:
        """What the graph has let go of is no longer there to evict, and no longer missing."""
        for index in [one for one in self._evictable if self._recording.lifetimes[one].end_point <= place]:
            self._evictable.discard(index)
        for index in [one for one in self._evicted if self._recording.lifetimes[one].end_point <= place]:
            self._evicted.discard(index)
            self._back.add(index)
            self._more += self._recording.lifetimes[index].nbytes

    def _access(self, index: int, *, is_save: bool = False) -> None:
        """A plan has what it rebuilds back from its first use on: what was used can no longer be chosen."""
        self._accessed_ns[index] = self._now_ns
        if not is_save:
            self._evictable.discard(index)

    def _make_room(self, needed_bytes: int, locked: Iterable[int] = ()) -> None:
        while needed_bytes + self._more > self._budget_bytes:
            candidates = self._evictable.difference(locked)
            if not candidates:
                return
            self._evict(min(candidates, key=lambda one: (self._heuristic(one), one)))

    def _heuristic(self, index: int) -> float:
        if index not in self._costs:
            near = self._neighbourhood(index)
            self._costs[index] = sum(self._rebuilds[one].compute_ns for one in (index, *near))
        stale_ns = max(self._now_ns - self._accessed_ns.get(index, 0), 1)
        return self._costs[index] / (self._recording.lifetimes[index].nbytes * stale_ns)

    def _evict(self, index: int) -> None:
        self._evictable.discard(index)
        self._evicted.add(index)
        self._more -= self._recording.lifetimes[index].nbytes
        self._forget_costs(index)

    def _rebuild(self, index: int, allocated_bytes: int, locked: Sequence[int]) -> None:
        if index not in self._evicted:
            return
        rebuild = self._rebuilds[index]
        for source in rebuild.inputs:
            self._rebuild(source, allocated_bytes, (*locked, *rebuild.inputs))
            self._access(source)
        self._make_room(allocated_bytes + rebuild.extra_bytes, (*locked, *rebuild.inputs))
        self._now_ns += rebuild.compute_ns
        self._forget_costs(index)
        self._evicted.discard(index)
        self._back.add(index)
        self._more += self._recording.lifetimes[index].nbytes

    # Neighbourhoods.

    def _neighbourhood(self, index: int) -> set[int]:
        """Evicted, and to be rebuilt before it or only after it, in a row without gaps."""
        return (self._along(index, self._made_from) | self._along(index, self._waiting_for)) & self._evicted - {index}

    def _forget_costs(self, index: int) -> None:
        """Of all in whose neighbourhood it is or was."""
        for one in (index, *self._along(index, self._made_from), *self._along(index, self._waiting_for)):
            self._costs.pop(one, None)

    def _made_from(self, index: int) -> Sequence[int]:
        rebuild = self._rebuilds.get(index)
        return () if rebuild is None else rebuild.inputs

    def _waiting_for(self, index: int) -> Sequence[int]:
        return self._readers.get(index, ())

    def _along(self, index: int, way: Callable[[int], Sequence[int]]) -> set[int]:
        """What can be reached over what is evicted, the first that is not included."""
        found, ahead = set(way(index)), list(way(index))
        while ahead:
            one = ahead.pop()
            if one in self._evicted:
                ahead += [other for other in way(one) if other not in found]
                found.update(way(one))
        return found
