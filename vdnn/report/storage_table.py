"""The largest storages of a step, with the action for each, its cost and its reason. Plain data for tables."""

from __future__ import annotations

from dataclasses import dataclass

from vdnn.report.explanation import added
from vdnn.report.held_bytes import actions_of
from vdnn.step.plan import Action
from vdnn.step.recording import Recording, SaveKey
from vdnn.step.saved_step import SavedStep
from vdnn.step.timeline import Timeline


@dataclass(frozen=True, slots=True)
class StorageRow:
    """One storage. `copy_ns` is the time of its copies in both directions; `waited_ns` is how long the compute stream
    waited for it at its uses; `recompute_ns` is the time of its recompute. None if that does not apply."""

    lifetime: int
    name: str
    shape: str
    nbytes: int
    action: Action | None
    copy_ns: int | None
    waited_ns: int | None
    recompute_ns: int | None
    why: str


def storage_name(recording: Recording, lifetime: int) -> str:
    """The producer and the module of the first save, as in "Relu in layer1.0.relu"."""
    key = first_key(recording, lifetime)
    if key is None:
        return f"storage {lifetime}"
    again = f", number {key.occurrence + 1}" if key.occurrence else ""
    return f"{operation_name(key.producer) or 'leaf'} in {key.module or 'no module'}{again}"


def operation_name(node: str) -> str:
    """The name of the operation of a node of the graph: "Relu" for "ReluBackward0"."""
    return node.rstrip("0123456789").removesuffix("Backward")


def first_key(recording: Recording, lifetime: int) -> SaveKey | None:
    return recording.points[recording.lifetimes[lifetime].saves[0]].key


def largest_storages(step: SavedStep, most: int) -> tuple[StorageRow, ...]:
    """The largest storages of a step, at most `most`. None without a recording."""
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
    recomputed = lifetime.recompute if action in (Action.RECOMPUTE, Action.COMPRESS) else None
    copy_ns = None if timeline is None or action is not Action.OFFLOAD else _copied_ns(timeline, index)
    return StorageRow(
        index,
        storage_name(recording, index),
        "" if key is None else f"{key.dtype} {' x '.join(map(str, key.size))}",
        lifetime.nbytes,
        action,
        copy_ns,
        None if timeline is None or action is not Action.OFFLOAD else _waited_ns(step, timeline, index),
        None if recomputed is None else recomputed.compute_ns + recomputed.discard_ns,
        _why(step, recording, index, action),
    )


def _copied_ns(timeline: Timeline, index: int) -> int:
    return sum(copy.end_ns - copy.begin_ns for copy in timeline.copies if copy.lifetime == index)


def _waited_ns(step: SavedStep, timeline: Timeline, index: int) -> int:
    """How long the compute stream waited for the reloads of the storage, at the plan's points of its uses."""
    if step.plan is None:
        return 0
    own = {number for number, point in enumerate(step.plan.points) if point.lifetime == index}
    return sum(mark.reload_stall_ns for mark in timeline.marks if mark.point in own)


def _why(step: SavedStep, recording: Recording, index: int, action: Action | None) -> str:
    """The reason for the action, from the recording, the plan and the plan's reasons."""
    said = []
    recompute = recording.lifetimes[index].recompute
    if action in (Action.RECOMPUTE, Action.COMPRESS) and recompute is not None:
        said.append(f"recomputed by {recompute.operation}")
    if action is Action.OFFLOAD and step.plan is not None:
        times = len(step.plan.lifetimes[index].absences)
        said.append("offloaded once" if times == 1 else f"offloaded {times} times")
    if action is Action.OFFLOAD and recompute is None:
        said.append("cannot be recomputed")
    reason = next((one for one in step.reasons.storages if one.lifetime == index), None) if step.reasons else None
    if reason is not None:
        said.append(_next_best(reason.second_best, reason.more_ns, action))
    return "; ".join(said)


def _next_best(second: Action | None, more_ns: int | None, action: Action | None) -> str:
    if second is None:
        return "the step fits with it" if action is Action.KEEP else "no other action fits"
    costs = "" if more_ns is None else f" would add {added(more_ns)}"
    return f"next best: {second.value}{costs}"
