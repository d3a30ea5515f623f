"""The step of a compiled region as a Recording: the times of its kernels, and the values saved for backward.

Nodes run in the order of the two graphs. The bytes at a point are the inputs and outputs of the region, and the saved
values that are still to be read. The memory of a running kernel is not counted. A value can leave if its storage is
saved through one tensor that covers it, and if it is neither an input nor an output of the region.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import fx

from vdnn.runtime.torch_internals.joint_graph import SavedStorage
from vdnn.step.recording import Lifetime, Point, PointKind, Recording, SaveKey

_BEFORE, _AFTER = 0, 1


class NodePlace(NamedTuple):
    """Right before or behind a node. `node` counts those of forward, and then those of backward."""

    node: int
    side: int


@dataclass(frozen=True, slots=True)
class GraphStep:
    """A region as the planner sees it. `places` has one entry for each point but the last; point `boundary` is between
    forward and backward. `storages` has one entry for each lifetime. Points also count values that cannot leave."""

    recording: Recording
    places: tuple[NodePlace, ...]
    boundary: int
    storages: tuple[SavedStorage, ...]


class _Read(NamedTuple):
    storage: SavedStorage
    made: NodePlace
    free: NodePlace
    first_use: NodePlace
    last_use: NodePlace


def graph_step(
    forward: fx.Graph,
    backward: fx.Graph,
    storages: Sequence[SavedStorage],
    ends_bytes: int,
    node_ns: Mapping[fx.Node, float],
    is_view: Callable[[fx.Node], bool],
) -> GraphStep:
    """The step of one cut. `node_ns` has the time of each node that runs a kernel."""
    ahead, behind = list(forward.nodes), list(backward.nodes)
    all_reads = [one for one in (_read(storage, ahead, behind, is_view) for storage in storages) if one is not None]
    reads = [one for one in all_reads if one.storage.can_leave]
    boundary = NodePlace(len(ahead) - 1, _BEFORE)
    places = sorted({boundary, *(one.made for one in reads), *(one.first_use for one in reads)})
    events: list[tuple[NodePlace, int | None]] = [(boundary, None)]
    events += [(one.made, index) for index, one in enumerate(reads)]
    events += [(one.first_use, index) for index, one in enumerate(reads)]
    events.sort(key=lambda event: event[0])
    places = [place for place, _ in events]
    numbers = {event: number for number, event in enumerate(events)}
    last = len(places)

    def first_at(place: NodePlace) -> int:
        return min(bisect_left(places, place), last)

    lifetimes = []
    for index, one in enumerate(reads):
        made, use = numbers[one.made, index], numbers[one.first_use, index]
        done = max(first_at(NodePlace(one.last_use.node, _AFTER)), use + 1)
        free = max(first_at(one.free), made)
        lifetimes.append(Lifetime(one.storage.nbytes, (made,), (use,), (done,), made, free, done))
    fixed = [
        (first_at(one.made), first_at(NodePlace(one.last_use.node, _AFTER)), one.storage.nbytes)
        for one in all_reads
        if not one.storage.can_leave
    ]
    changes = _changes([*fixed, *((one.saves[0], one.end_point, one.nbytes) for one in lifetimes)], last + 1)
    times = _times(places, [node_ns.get(node, 0.0) for node in (*ahead, *behind)])
    points = _points(events, times, changes, ends_bytes)
    recording = Recording(
        backend="compiled",
        device_name="",
        device_bytes=0,
        torch_version=torch.__version__,
        clock="virtual",
        resident_bytes=ends_bytes,
        parameter_bytes=0,
        points=tuple(points),
        lifetimes=tuple(lifetimes),
    )
    return GraphStep(recording, tuple(places), numbers[boundary, None], tuple(one.storage for one in reads))


def _read(
    storage: SavedStorage, ahead: list[fx.Node], behind: list[fx.Node], is_view: Callable[[fx.Node], bool]
) -> _Read | None:
    places = {node: place for place, node in enumerate((*ahead, *behind))}
    given = [node for node in behind if node.op == "placeholder" and node.name in storage.names]
    made = [node for node in ahead if node.name in storage.names and node.op != "output"]
    if not made:
        return None
    used = [places[user] for node in given for user in node.users]
    latest = max(places[node] for node in made)
    if not used:
        # Torch calls the states of random generators something else in backward. Such a value is held to the end.
        end = NodePlace(len(ahead) + len(behind) - 1, _AFTER)
        return _Read(replace(storage, can_leave=False), NodePlace(latest, _AFTER), end, end, end)
    readers = [places[user] for node in made for user in _readers(node, is_view)]
    read = [places[user] for node in given for user in _readers(node, is_view)]
    return _Read(
        storage,
        NodePlace(latest, _AFTER),
        NodePlace(max([latest, *readers]), _AFTER),
        NodePlace(min(used), _BEFORE),
        NodePlace(max(read), _AFTER),
    )


def _readers(node: fx.Node, is_view: Callable[[fx.Node], bool]) -> set[fx.Node]:
    """Whoever reads the memory of `node`, through views too. The output of a graph reads nothing."""
    found: set[fx.Node] = set()
    pending = [node]
    while pending:
        for user in pending.pop().users:
            if user.op != "output" and user not in found:
                found.add(user)
                if is_view(user):
                    pending.append(user)
    return found or {node}


def _times(places: Sequence[NodePlace], node_ns: Sequence[float]) -> list[int]:
    """The time before each place, and behind the last one."""
    until = [0.0]
    for one in node_ns:
        until.append(until[-1] + one)
    moments = [round(until[place.node + place.side]) for place in places]
    ends = [*moments, round(until[-1])]
    return [end - begin for begin, end in zip([0, *moments], ends, strict=True)]


def _changes(held: Iterable[tuple[int, int, int]], points: int) -> list[int]:
    """The change of the bytes at each point. `held`: (first point, point of the end, bytes)."""
    changes = [0] * points
    for first, end, nbytes in held:
        changes[first] += nbytes
        changes[end] -= nbytes
    return changes


def _points(
    events: Sequence[tuple[NodePlace, int | None]], times: Sequence[int], changes: Sequence[int], ends_bytes: int
) -> list[Point]:
    points, held, seen = [], ends_bytes, set[int]()
    for number, (_, lifetime) in enumerate([*events, (None, None)]):
        before, held = held, held + changes[number]
        is_save = lifetime is not None and lifetime not in seen
        if lifetime is not None:
            seen.add(lifetime)
        kind = PointKind.SAVE if is_save else PointKind.END if number == len(events) else PointKind.USE
        key = SaveKey("", str(lifetime), "", (), (), 0) if is_save else None
        points.append(Point(kind, lifetime, key, times[number], held, max(before, held)))
    return points
