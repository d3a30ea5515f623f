"""largest-first: offloads the largest storages until the rest fits (torchtitan's graph_trainer, cpu_offload.py).

torchtitan's rule offloads what all layers but the last save, the largest first, up to a budget of host bytes.
The compute stream waits for a copy at the end of the layer `layers_out` after the last layer that saved it. The reload
is issued when the backward pass enters the layer `layers_ahead` before the one that uses it. A layer is a block of
modules: their path up to its first number ("layers.3" of "layers.3.attention.wq").
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from vdnn.planning.footprint import absent_intervals
from vdnn.planning.gaps import Gap, gaps_of, planned_lifetimes
from vdnn.planning.policies.plan_policy import PlanPolicy, PlanRequest
from vdnn.planning.policies.under_budget import budget_to_meet, keep_everything
from vdnn.step.plan import Absence, Plan, make_plan
from vdnn.step.recording import Lifetime, PointKind, Recording


class LargestFirst(PlanPolicy):
    """Without a budget nothing is offloaded. `layers_out` and `layers_ahead` are 1 in torchtitan. `host_bytes` is
    torchtitan's own budget: storages that are too large for the rest of it are kept.

    Differences from torchtitan: its only budget is that of host bytes. Under a device budget, the plan here is the one
    for the smallest host budget that suffices. Its rules for what can be offloaded at all (at least 4 KiB, no views,
    dense) are left out, because a recording has applied them already, and so is its skipping of what a layer
    recomputes.
    """

    def __init__(self, *, layers_out: int = 1, layers_ahead: int = 1, host_bytes: int | None = None) -> None:
        self._layers_out = layers_out
        self._layers_ahead = layers_ahead
        self._host_bytes = host_bytes

    @property
    def name(self) -> str:
        return "largest-first"

    @property
    def source(self) -> str:
        return "torchtitan graph_trainer, activation offloading (2026)"

    def plan(self, request: PlanRequest) -> Plan:
        budget_bytes = budget_to_meet(request)
        if budget_bytes is None:
            return keep_everything(request, self.name)
        recording = request.recording
        peaks = [point.peak_bytes for point in recording.points]
        chosen: dict[Gap, Absence] = {}
        host_bytes = 0
        for gap, absence in sorted(self._absences(recording), key=lambda one: -one[0].nbytes):
            if max(peaks) <= budget_bytes:
                break
            if self._host_bytes is not None and host_bytes + gap.nbytes > self._host_bytes:
                continue
            host_bytes += gap.nbytes
            chosen[gap] = absence
            for interval in absent_intervals(recording.lifetimes[gap.lifetime], absence):
                peaks[interval] -= gap.nbytes
        return make_plan(recording, self.name, planned_lifetimes(recording, chosen), budget_bytes)

    def _absences(self, recording: Recording) -> Iterator[tuple[Gap, Absence]]:
        """The first absence of every lifetime that may be offloaded, with its gap."""
        visits = _Visits(recording)
        seen: set[int] = set()
        for gap in gaps_of(recording):
            lifetime = recording.lifetimes[gap.lifetime]
            if gap.lifetime in seen or visits.is_of_last_layer(lifetime):
                continue
            seen.add(gap.lifetime)
            release_point = max(visits.end_of_layer(lifetime.saves[-1], self._layers_out), gap.first - 1)
            absence = Absence(release_point)
            if gap.use is not None:
                entered = max(visits.entry_of_layer(gap.use, self._layers_ahead), release_point + 1)
                absence = Absence(release_point, None if entered >= gap.use else entered)
            if release_point < gap.last:
                yield gap, absence


class _Visit(NamedTuple):
    """Consecutive points of one layer, all of them saves or all of them uses."""

    layer: str
    first: int
    last: int


class _Visits:
    """The layers in the order in which the step runs them. A use belongs to the layer of the last save of its storage,
    so a storage that layers share is offloaded as late as the last of them needs."""

    def __init__(self, recording: Recording) -> None:
        layers = [_layer_of(recording, lifetime) for lifetime in recording.lifetimes]
        self._saves: list[_Visit] = []
        self._uses: list[_Visit] = []
        self._visit_of: dict[int, int] = {}  # by point: the index of its visit in _saves or _uses
        for index, point in enumerate(recording.points):
            if point.lifetime is None:
                continue
            is_save = point.kind is PointKind.SAVE
            layer = block_of(point.key.module) if point.key is not None else layers[point.lifetime]
            visits = self._saves if is_save else self._uses
            if visits and visits[-1].layer == layer:
                visits[-1] = visits[-1]._replace(last=index)
            else:
                visits.append(_Visit(layer, index, index))
            self._visit_of[index] = len(visits) - 1

    def is_of_last_layer(self, lifetime: Lifetime) -> bool:
        """True if the last layer saves the storage, unless it is the only layer."""
        last = self._saves[-1]
        return any(visit.layer != last.layer for visit in self._saves) and lifetime.saves[-1] >= last.first

    def end_of_layer(self, save: int, layers_on: int) -> int:
        """The first point after the layer that is `layers_on` after that of the save, or after the last layer."""
        visit = min(self._visit_of[save] + layers_on, len(self._saves) - 1)
        return self._saves[visit].last + 1

    def entry_of_layer(self, use: int, layers_before: int) -> int:
        """The first use of the layer that is `layers_before` layers ahead of the layer of this use, or of the first
        layer."""
        return self._uses[max(self._visit_of[use] - layers_before, 0)].first


def _layer_of(recording: Recording, lifetime: Lifetime) -> str:
    return block_of(_modules(recording, lifetime.saves)[-1])


def _modules(recording: Recording, saves: Iterable[int]) -> list[str]:
    keys = [recording.points[save].key for save in saves]
    return ["" if key is None else key.module for key in keys]


def block_of(module: str) -> str:
    """The part of a module's path up to its first number, or all of it if it has none."""
    parts = module.split(".")
    numbered = next((index for index, part in enumerate(parts) if part.isdigit()), len(parts) - 1)
    return ".".join(parts[: numbered + 1])
