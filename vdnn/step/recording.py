"""Recording: what one training step saved and used, when, how large, and at what cost. Plain data, no torch.

A recording speaks of the step as it would have been with everything kept on the device: the recorder has taken stalls
and moved bytes out again. Points are the step's eligible saves and uses in the order they happened, and its end; small
saves, parameters and whatever else always stays are no points and are part of the allocated bytes.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import Enum

from vdnn.step.json_form import load_file, save_text, to_json

_FORM, _VERSION = "vdnn recording", 4


class PointKind(Enum):
    """What happened at a point."""

    SAVE = "save"
    USE = "use"
    END = "end"  # of the step; there is one, the last


@dataclass(frozen=True, slots=True)
class SaveKey:
    """What a save is recognised by from step to step, besides its place in the order.

    `producer` is the operation that made the tensor ("" for a leaf), `module` the innermost module whose forward ran,
    `occurrence` counts the saves of a step that are alike in all else.
    """

    producer: str
    module: str
    dtype: str
    size: tuple[int, ...]
    stride: tuple[int, ...]
    occurrence: int

    def __str__(self) -> str:
        made = self.producer or "a leaf"
        again = f" (number {self.occurrence + 1} of its kind)" if self.occurrence else ""
        return f"{made} in {self.module or 'no module'}, {self.dtype} {list(self.size)}{again}"


def key_of_encoded(saved: SaveKey, codec: str, kept_bytes: int) -> SaveKey:
    """Of what a codec leaves of this save."""
    producer = f"{codec} of {saved.producer or 'a leaf'}, {saved.dtype} {list(saved.size)}"
    return SaveKey(producer, saved.module, "uint8", (kept_bytes,), (1,), saved.occurrence)


@dataclass(frozen=True, slots=True)
class Point:
    """One save or use. `compute_ns` is what was computed since the point before; `allocated_bytes` what was allocated
    at it, and `peak_bytes` the highest since the point before, with everything kept. `operation` is the node of the
    graph that used it, such as "ConvolutionBackward0": "" at a save, and outside of a backward."""

    kind: PointKind
    lifetime: int | None
    key: SaveKey | None  # of a save
    compute_ns: int
    allocated_bytes: int
    peak_bytes: int
    operation: str = ""


@dataclass(frozen=True, slots=True)
class Rebuild:
    """How a storage can be made anew instead of being brought back: by `operation`, such as "relu <- batch_norm", from
    these lifetimes, which it uses in this order. From `known_point` on it may be given up for that. `extra_bytes` are
    needed at most above what was allocated before, its own included. A codec is one that leaves `kept_bytes` in its
    place, and reads nothing but that; leaving it takes `giving_up_ns` right before that point, and `giving_up_bytes`
    at most, what is kept included."""

    operation: str
    inputs: tuple[int, ...]
    known_point: int
    compute_ns: int
    extra_bytes: int
    kept_bytes: int = 0
    giving_up_ns: int = 0
    giving_up_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Lifetime:
    """One storage version from its first save to its end. Numbers but `nbytes` are indices of points.

    A copy of it can be made from `copy_point` on. From `free_point` on nobody else holds it: giving it up frees it. At
    `end_point` the graph has let go of it. What reads it after a use has read it at the point in `read` of the same
    place: an operation first asks for all it has saved, and then runs. `rebuild`: None if it cannot be.
    """

    nbytes: int
    saves: tuple[int, ...]
    uses: tuple[int, ...]
    read: tuple[int, ...]
    copy_point: int
    free_point: int
    end_point: int
    rebuild: Rebuild | None = None


@dataclass(frozen=True, slots=True)
class Recording:
    """One step. `clock` says whose time it is: "virtual", "device" or "host"."""

    backend: str
    device_name: str
    device_bytes: int
    torch_version: str
    clock: str
    resident_bytes: int  # allocated when the step began
    parameter_bytes: int
    points: tuple[Point, ...]
    lifetimes: tuple[Lifetime, ...]

    @property
    def compute_ns(self) -> int:
        return sum(point.compute_ns for point in self.points)

    @property
    def peak_bytes(self) -> int:
        """With everything kept."""
        return max(point.peak_bytes for point in self.points)

    @property
    def managed_bytes(self) -> int:
        return sum(lifetime.nbytes for lifetime in self.lifetimes)

    def save(self, path: str | os.PathLike[str]) -> None:
        save_text(to_json(self, _FORM, _VERSION), path)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Recording:
        return load_file(path, Recording, _FORM, _VERSION)
