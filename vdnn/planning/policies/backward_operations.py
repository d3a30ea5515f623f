"""Finds the operations of the backward pass in a recording, in their order. The papers call them layers.

A recording has a point for every use of a saved tensor. Uses that are read at the same point belong to one operation:
it first asks for all its saved tensors, and then runs.
"""

from __future__ import annotations

from typing import NamedTuple

from vdnn.step.recording import Lifetime, PointKind, Recording

_CONVOLUTION = "ConvolutionBackward"


class BackwardOperation(NamedTuple):
    """An operation that runs between its last use and `read_point`. `lifetimes` are in the order of its uses."""

    name: str
    uses: tuple[int, ...]
    read_point: int
    lifetimes: tuple[int, ...]

    @property
    def is_convolution(self) -> bool:
        return self.name.startswith(_CONVOLUTION)


def operations_of(recording: Recording) -> tuple[BackwardOperation, ...]:
    uses_by_read_point: dict[int, list[tuple[int, int]]] = {}  # by the point at which they are read: (use, lifetime)
    for use, point in enumerate(recording.points):
        if point.kind is PointKind.USE and point.lifetime is not None:
            lifetime = recording.lifetimes[point.lifetime]
            read_point = lifetime.read[lifetime.uses.index(use)]
            uses_by_read_point.setdefault(read_point, []).append((use, point.lifetime))
    return tuple(
        BackwardOperation(
            name=recording.points[uses[0][0]].operation,
            uses=tuple(use for use, _ in uses),
            read_point=read_point,
            lifetimes=tuple(dict.fromkeys(lifetime for _, lifetime in uses)),
        )
        for read_point, uses in sorted(uses_by_read_point.items(), key=lambda one: one[1][0])
    )


def is_used_by_convolution(recording: Recording, lifetime: Lifetime) -> bool:
    return any(recording.points[use].operation.startswith(_CONVOLUTION) for use in lifetime.uses)
