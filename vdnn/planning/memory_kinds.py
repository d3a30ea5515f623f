"""Splits the memory of a step, with everything kept, into its kinds: parameters, gradients, feature maps and so on."""

from __future__ import annotations

from dataclasses import dataclass

from vdnn.planning.least_memory import least_bytes
from vdnn.step.recording import PointKind, Recording


@dataclass(frozen=True, slots=True)
class MemoryKinds:
    """Bytes of each kind. `feature_maps`: storages that are saved for the backward pass and may be moved.
    `gradient_maps`: the peak of the backward pass beyond all these, less the parameters' gradients that `gradients`
    counts. `workspace`: the peak of the forward pass beyond all these. `floor`: the least total that any plan reaches.
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
    """The caller gives the bytes of parameters, gradients and optimizer, which a recording does not tell apart."""
    points = recording.points
    saved = [0] * (len(points) + 1)
    for lifetime in recording.lifetimes:
        saved[lifetime.saves[0]] += lifetime.nbytes
        saved[min(lifetime.end_point + 1, len(points))] -= lifetime.nbytes
    alive, others = 0, []
    for index, point in enumerate(points):
        alive += saved[index]
        others.append(point.peak_bytes - recording.resident_bytes - alive)
    first_use = next((index for index, point in enumerate(points) if point.kind is PointKind.USE), len(points))
    backward = max(others[first_use:], default=0)
    return MemoryKinds(
        parameters=parameter_bytes,
        gradients=gradient_bytes,
        optimizer=optimizer_bytes,
        feature_maps=recording.managed_bytes,
        gradient_maps=max(0, backward - gradient_bytes),
        workspace=max(0, max(others[:first_use], default=0)),
        floor=least_bytes(recording),
    )
