"""dtr: when memory is short, evicts storages that are cheap, large and long unused (Kirisame et al., ICLR 2021).

Dynamic tensor rematerialization, simulated over the recorded points without knowledge of later points. Whenever the
step needs more than the budget, the storage with the least h = cost / (bytes x staleness) is evicted, until the step
fits. Staleness is the time since the last access. The cost is that of the storage's recompute and of its evicted
neighbourhood: all evicted storages that would be recomputed for it, and all that wait for it. An access to an evicted
storage recomputes its evicted inputs and then the storage.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from vdnn.planning.footprint import absent_intervals
from vdnn.planning.policies.plan_policy import PlanPolicy, PlanRequest
from vdnn.planning.policies.under_budget import budget_to_meet, keep_everything
from vdnn.planning.published.recomputed_steps import RecomputedSteps, plan_of_recomputes
from vdnn.step.plan import Absence, Plan
from vdnn.step.recording import PointKind, Recording


class Dtr(PlanPolicy):
    """The full heuristic, h_DTR. Without a budget nothing is evicted.

    Differences from the paper: the plan recomputes all storages that the simulation evicted. A plan recomputes a
    storage once, so a recomputed storage is not evicted again; what DTR does then, at the least budgets, cannot be
    planned. A plan discards at once what it recomputes, not only when memory is short: the step takes the same time and
    no more memory. If evicting everything is not enough, DTR runs out of memory; the plan is then what the simulation
    has reached, over the budget.
    """

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
        return plan_of_recomputes(request, self.name, _Run(request.recording, budget_bytes).evicted_at_all())


class _Run:
    """The simulation. A storage is on the device, evicted, or recomputed and no longer evictable."""

    def __init__(self, recording: Recording, budget_bytes: int) -> None:
        self._recording = recording
        self._budget_bytes = budget_bytes
        self._recomputes = RecomputedSteps(recording).recomputes
        self._readers: defaultdict[int, list[int]] = defaultdict(list)
        for index, recompute in self._recomputes.items():
            for source in recompute.inputs:
                self._readers[source].append(index)
        self._now_ns = 0
        self._accessed_ns: dict[int, int] = {}
        self._evictable: set[int] = set()
        self._evicted: set[int] = set()
        self._recomputed: set[int] = set()  # recomputed, or released by the graph
        self._costs: dict[int, int] = {}  # of evictable storages, with their neighbourhoods
        self._more_bytes = 0  # bytes above the step with everything kept: evictions subtract, recomputes add

    def evicted_at_all(self) -> set[int]:
        known = defaultdict(list)
        for index, recompute in self._recomputes.items():
            absent = absent_intervals(self._recording.lifetimes[index], Absence(recompute.known_point))
            known[absent.start].append(index)
        for place, point in enumerate(self._recording.points):
            self._evictable.update(known.pop(place, ()))
            self._now_ns += point.compute_ns
            self._make_room(point.peak_bytes)
            if point.kind is PointKind.USE and point.lifetime is not None:
                self._recompute(point.lifetime, point.allocated_bytes, locked=())
            if point.lifetime is not None:
                self._access(point.lifetime, is_save=point.kind is PointKind.SAVE)
            self._end(place)
        return self._evicted | self._recomputed

    def _end(self, place: int) -> None:
        """Storages that the graph has released cannot be evicted and no longer count as evicted."""
        for index in [one for one in self._evictable if self._recording.lifetimes[one].end_point <= place]:
            self._evictable.discard(index)
        for index in [one for one in self._evicted if self._recording.lifetimes[one].end_point <= place]:
            self._evicted.discard(index)
            self._recomputed.add(index)
            self._more_bytes += self._recording.lifetimes[index].nbytes

    def _access(self, index: int, *, is_save: bool = False) -> None:
        """In a plan a recomputed storage is on the device from its first use on, so a used one is not evictable."""
        self._accessed_ns[index] = self._now_ns
        if not is_save:
            self._evictable.discard(index)

    def _make_room(self, needed_bytes: int, locked: Iterable[int] = ()) -> None:
        while needed_bytes + self._more_bytes > self._budget_bytes:
            candidates = self._evictable.difference(locked)
            if not candidates:
                return
            self._evict(min(candidates, key=lambda one: (self._heuristic(one), one)))

    def _heuristic(self, index: int) -> float:
        if index not in self._costs:
            near = self._neighbourhood(index)
            self._costs[index] = sum(self._recomputes[one].compute_ns for one in (index, *near))
        stale_ns = max(self._now_ns - self._accessed_ns.get(index, 0), 1)
        return self._costs[index] / (self._recording.lifetimes[index].nbytes * stale_ns)

    def _evict(self, index: int) -> None:
        self._evictable.discard(index)
        self._evicted.add(index)
        self._more_bytes -= self._recording.lifetimes[index].nbytes
        self._forget_costs(index)

    def _recompute(self, index: int, allocated_bytes: int, locked: Sequence[int]) -> None:
        if index not in self._evicted:
            return
        recompute = self._recomputes[index]
        for source in recompute.inputs:
            self._recompute(source, allocated_bytes, (*locked, *recompute.inputs))
            self._access(source)
        self._make_room(allocated_bytes + recompute.extra_bytes, (*locked, *recompute.inputs))
        self._now_ns += recompute.compute_ns
        self._forget_costs(index)
        self._evicted.discard(index)
        self._recomputed.add(index)
        self._more_bytes += self._recording.lifetimes[index].nbytes

    # Neighbourhoods.

    def _neighbourhood(self, index: int) -> set[int]:
        """Evicted storages that its recompute needs, or that need it, over chains of evicted storages."""
        return (self._along(index, self._made_from) | self._along(index, self._waiting_for)) & self._evicted - {index}

    def _forget_costs(self, index: int) -> None:
        """Forgets the costs of all storages in whose neighbourhood `index` is or was."""
        for one in (index, *self._along(index, self._made_from), *self._along(index, self._waiting_for)):
            self._costs.pop(one, None)

    def _made_from(self, index: int) -> Sequence[int]:
        recompute = self._recomputes.get(index)
        return () if recompute is None else recompute.inputs

    def _waiting_for(self, index: int) -> Sequence[int]:
        return self._readers.get(index, ())

    def _along(self, index: int, neighbours: Callable[[int], Sequence[int]]) -> set[int]:
        """Storages that can be reached over evicted ones, with the first on each path that is not evicted."""
        found, ahead = set(neighbours(index)), list(neighbours(index))
        while ahead:
            one = ahead.pop()
            if one in self._evicted:
                ahead += [other for other in neighbours(one) if other not in found]
                found.update(neighbours(one))
        return found
