"""What a step's memory is made of, with everything kept: what one wants to know before the first run."""

from __future__ import annotations

from dataclasses import dataclass

from vdnn.planning.least_memory import least_bytes
from vdnn.step.recording import PointKind, Recording


@dataclass(frozen=True, slots=True)
class MemoryKinds:
    """Bytes. `feature_maps` is what is saved for the backward and may move; `gradient_maps` the most that the backward
    needs besides at any point, gradients of parameters included only as far as `gradients` does not count them;
    `workspace` what the forward needs besides, at most. `floor` is the least that any plan reaches, all kinds together.
    """

    parameters: int
    gradients: int
    optimizer: int
    feature_maps: int
    gradient_maps: int
    workspace: int
    floor: int


def memory_kinds(
    recording: Recording, *, parameter_bytes: int, gradient_bytes: int, optimizer_bytes: int
) -> MemoryKinds:
    """What parameters, gradients and the optimizer hold is said by whoever made the step."""
    points = recording.points
    saved = [0] * (len(points) + 1)
    for lifetime in recording.lifetimes:
        saved[lifetime.saves[0]] += lifetime.nbytes
        saved[min(lifetime.end_point + 1, len(points))] -= lifetime.nbytes
    alive, besides = 0, []
    for place, point in enumerate(points):
        alive += saved[place]
        besides.append(point.peak_bytes - recording.resident_bytes - alive)
    first_use = next((place for place, point in enumerate(points) if point.kind is PointKind.USE), len(points))
    backward = max(besides[first_use:], default=0)
    return MemoryKinds(
        parameters=parameter_bytes,
        gradients=gradient_bytes,
        optimizer=optimizer_bytes,
        feature_maps=recording.managed_bytes,
        gradient_maps=max(0, backward - gradient_bytes),
        workspace=max(0, max(besides[:first_use], default=0)),
        floor=least_bytes(recording),
    )
