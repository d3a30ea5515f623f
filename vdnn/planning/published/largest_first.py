"""largest-first: the largest storages leave until the rest fits (torchtitan's graph_trainer, cpu_offload.py).

The rule of torchtitan: of what the layers but the last save, the largest leave first, as many as a budget of host bytes
holds. The compute stream waits for a copy `layers_out` layers after the last layer that used it, at that layer's end;
it comes back as the backward pass enters the layer `layers_ahead` before the one that uses it. Both are 1 there.

Its one number is the host budget. Under a device budget the plan here is that of the smallest host budget that will do.
A layer is a block of modules: their path up to its first number ("layers.3" of "layers.3.attention.wq"). Left out: its
rules for what can be offloaded at all (at least 4 KiB, no views, dense), which a recording has applied already, and its
skipping of what a layer recomputes.
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
    """`host_bytes` is torchtitan's own budget: what is too large for the rest of it stays."""

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
        """Of every lifetime that may leave, the first time it is away."""
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
    """Points of one layer behind one another, all saves or all uses."""

    layer: str
    first: int
    last: int


class _Visits:
    """Layers in the order in which the step comes through them. A use belongs to the layer of the last save of what it
    uses: what layers share goes as late as the last of them allows."""

    def __init__(self, recording: Recording) -> None:
        layers = [_layer_of(recording, lifetime) for lifetime in recording.lifetimes]
        self._layers = layers
        self._saves: list[_Visit] = []
        self._uses: list[_Visit] = []
        self._place: dict[int, int] = {}  # of a point's visit among those of its kind
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
            self._place[index] = len(visits) - 1

    def is_of_last_layer(self, lifetime: Lifetime) -> bool:
        """If there is more than one."""
        last = self._saves[-1]
        return any(visit.layer != last.layer for visit in self._saves) and lifetime.saves[-1] >= last.first

    def end_of_layer(self, save: int, layers_on: int) -> int:
        """The first point behind the layer that is so many behind that of the save, or behind the last."""
        place = min(self._place[save] + layers_on, len(self._saves) - 1)
        return self._saves[place].last + 1

    def entry_of_layer(self, use: int, layers_before: int) -> int:
        """The first use of the layer that is so many before that of the use, or of the first."""
        return self._uses[max(self._place[use] - layers_before, 0)].first


def _layer_of(recording: Recording, lifetime: Lifetime) -> str:
    return block_of(_modules(recording, lifetime.saves)[-1])


def _modules(recording: Recording, saves: Iterable[int]) -> list[str]:
    keys = [recording.points[save].key for save in saves]
    return ["" if key is None else key.module for key in keys]


def block_of(module: str) -> str:
    """Of a module's path the part up to its first number; all of it if there is none."""
    parts = module.split(".")
    numbered = next((place for place, part in enumerate(parts) if part.isdigit()), len(parts) - 1)
    return ".".join(parts[: numbered + 1])
