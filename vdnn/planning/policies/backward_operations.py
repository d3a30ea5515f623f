"""The operations that use what was saved, in their order: what the papers call the layers of the backward pass.

A recording has a point for every request of a saved tensor. Requests that are read at the same point were made by one
operation: it first asks for all it has saved, and then runs.
"""

from __future__ import annotations

from typing import NamedTuple

from vdnn.step.recording import Lifetime, PointKind, Recording

_CONVOLUTION = "ConvolutionBackward"


class Operation(NamedTuple):
    """It runs between its last use and `read_point`. `lifetimes` are those it uses, in the order of its requests."""

    name: str
    uses: tuple[int, ...]
    read_point: int
    lifetimes: tuple[int, ...]

    @property
    def is_convolution(self) -> bool:
        return self.name.startswith(_CONVOLUTION)


def operations_of(recording: Recording) -> tuple[Operation, ...]:
    requests: dict[int, list[tuple[int, int]]] = {}  # (use, lifetime), by the point at which they have been read
    for use, point in enumerate(recording.points):
        if point.kind is PointKind.USE and point.lifetime is not None:
            lifetime = recording.lifetimes[point.lifetime]
            read_point = lifetime.read[lifetime.uses.index(use)]
            requests.setdefault(read_point, []).append((use, point.lifetime))
    return tuple(
        Operation(
            name=recording.points[asked[0][0]].operation,
            uses=tuple(use for use, _ in asked),
            read_point=read_point,
            lifetimes=tuple(dict.fromkeys(lifetime for _, lifetime in asked)),
        )
        for read_point, asked in sorted(requests.items(), key=lambda one: one[1][0])
    )


def is_used_by_convolution(recording: Recording, lifetime: Lifetime) -> bool:
    return any(recording.points[use].operation.startswith(_CONVOLUTION) for use in lifetime.uses)
