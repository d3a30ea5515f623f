"""The largest storages of a step: what each is, what becomes of it, what that costs and why. Plain data for tables."""

from __future__ import annotations

from dataclasses import dataclass

from vdnn.report.held_bytes import actions_of
from vdnn.step.plan import Action
from vdnn.step.recording import Recording, SaveKey
from vdnn.step.saved_step import SavedStep
from vdnn.step.timeline import Timeline


@dataclass(frozen=True, slots=True)
class StorageRow:
    """`copy_ns` is what its copies took, both ways; `waited_ns` what the compute stream waited for it at its uses;
    `rebuild_ns` what making it again takes. None where that does not apply."""

    lifetime: int
    name: str
    shape: str
    nbytes: int
    action: Action | None
    copy_ns: int | None
    waited_ns: int | None
    rebuild_ns: int | None
    why: str


def storage_name(recording: Recording, lifetime: int) -> str:
    """What made it, and where: "Relu in layer1.0.relu"."""
    key = first_key(recording, lifetime)
    if key is None:
        return f"storage {lifetime}"
    again = f", number {key.occurrence + 1}" if key.occurrence else ""
    return f"{operation_name(key.producer) or 'leaf'} in {key.module or 'no module'}{again}"


def operation_name(node: str) -> str:
    """Of a node of the graph, such as "ReluBackward0"."""
    return node.rstrip("0123456789").removesuffix("Backward")


def first_key(recording: Recording, lifetime: int) -> SaveKey | None:
    return recording.points[recording.lifetimes[lifetime].saves[0]].key


def largest_storages(step: SavedStep, most: int) -> tuple[StorageRow, ...]:
    """Of a step that has a recording."""
    recording = step.recording
    if recording is None:
        return ()
    lifetimes = recording.lifetimes
    largest = sorted(range(len(lifetimes)), key=lambda index: (-lifetimes[index].nbytes, index))[:most]
    return tuple(_row(step, recording, index) for index in largest)


def _row(step: SavedStep, recording: Recording, index: int) -> StorageRow:
    timeline = step.measured or step.predicted
    lifetime, action = recording.lifetimes[index], actions_of(recording, step.plan)[index]
    key = first_key(recording, index)
    rebuilt = lifetime.rebuild if action in (Action.RECOMPUTE, Action.COMPRESS) else None
    copy_ns = None if timeline is None or action is not Action.OFFLOAD else _copied_ns(timeline, index)
    return StorageRow(
        index,
        storage_name(recording, index),
        "" if key is None else f"{key.dtype} {' x '.join(map(str, key.size))}",
        lifetime.nbytes,
        action,
        copy_ns,
        None if timeline is None or action is not Action.OFFLOAD else _waited_ns(step, timeline, index),
        None if rebuilt is None else rebuilt.compute_ns + rebuilt.giving_up_ns,
        _why(step, recording, index, action),
    )


def _copied_ns(timeline: Timeline, index: int) -> int:
    return sum(copy.end_ns - copy.begin_ns for copy in timeline.copies if copy.lifetime == index)


def _waited_ns(step: SavedStep, timeline: Timeline, index: int) -> int:
    """At its uses, for its copy back: the plan says which points those are."""
    if step.plan is None:
        return 0
    own = {place for place, point in enumerate(step.plan.points) if point.lifetime == index}
    return sum(mark.reload_stall_ns for mark in timeline.marks if mark.point in own)


def _why(step: SavedStep, recording: Recording, index: int, action: Action | None) -> str:
    """What the plan's reasons say, else what the recording and the timeline show."""
    said = []
    rebuild = recording.lifetimes[index].rebuild
    if action in (Action.RECOMPUTE, Action.COMPRESS) and rebuild is not None:
        said.append(f"made again by {rebuild.operation}")
    if action is Action.OFFLOAD and step.plan is not None:
        times = len(step.plan.lifetimes[index].absences)
        said.append("away once" if times == 1 else f"away {times} times")
    if action is Action.OFFLOAD and rebuild is None:
        said.append("cannot be rebuilt")
    reason = next((one for one in step.reasons.storages if one.lifetime == index), None) if step.reasons else None
    if reason is not None:
        said.append(_next_best(reason.second_best, reason.more_ns, action))
    return "; ".join(said)


def _next_best(second: Action | None, more_ns: int | None, action: Action | None) -> str:
    if second is None:
        return "the step fits with it" if action is Action.KEEP else "nothing else fits"
    added = "" if more_ns is None else f" would add {more_ns / 1e6:.2f} ms"
    return f"next best: {second.value}{added}"
