"""Recording: the saves and uses of one training step, with their times, sizes and costs. Plain data, no torch.

A recording describes the step as it would be with everything kept on the device: the recorder has subtracted stalls and
corrected for offloaded bytes. Points are the eligible saves and uses of the step in the order in which they happened,
and its end. Small saves, parameters and other storages that always stay on the device have no points; the allocated
bytes include them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from enum import Enum

from vdnn.step.json_form import load_file, save_text, to_json

_FORM, _VERSION = "vdnn recording", 4


class PointKind(Enum):
    """The event at a point."""

    SAVE = "save"
    USE = "use"
    END = "end"  # the end of the step, always the last point


@dataclass(frozen=True, slots=True)
class SaveKey:
    """Identifies a save from one step to the next, together with its position in the order.

    `producer` is the operation that made the tensor ("" for a leaf). `module` is the innermost module whose forward
    ran. `occurrence` numbers the saves of a step that are equal in all other fields.
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
    """The key of the encoded bytes that a codec keeps of this save."""
    producer = f"{codec} of {saved.producer or 'a leaf'}, {saved.dtype}"
    return SaveKey(producer, saved.module, "uint8", (kept_bytes,), (1,), saved.occurrence)


@dataclass(frozen=True, slots=True)
class Point:
    """One save or use, or the end of the step.

    `compute_ns` is the compute time since the previous point. `allocated_bytes` are the bytes allocated at this point,
    and `peak_bytes` the most since the previous point, both with everything kept. `operation` is the node of the graph
    that used the storage, such as "ConvolutionBackward0"; "" at a save and outside a backward pass. `issue_ns` is the
    time in which the host issues the operations since the previous point; 0 if nothing is known of the host.
    """

    kind: PointKind
    lifetime: int | None
    key: SaveKey | None  # only at a save
    compute_ns: int
    allocated_bytes: int
    peak_bytes: int
    operation: str = ""
    issue_ns: int = 0


@dataclass(frozen=True, slots=True)
class Recompute:
    """How a storage can be recomputed instead of reloaded.

    `operation`, such as "relu <- batch_norm", reads the lifetimes `inputs` in this order. The storage may be discarded
    from `known_point` on. The recompute needs at most `extra_bytes` above the bytes allocated before it, including the
    storage itself. A codec keeps `kept_bytes` and reads only those; its encoding takes `discard_ns` right before
    `known_point`, and at most `discard_bytes`, including the kept bytes. The host needs `issue_ns` for the recompute,
    and `discard_issue_ns` for the encoding of a codec.
    """

    operation: str
    inputs: tuple[int, ...]
    known_point: int
    compute_ns: int
    extra_bytes: int
    kept_bytes: int = 0
    discard_ns: int = 0
    discard_bytes: int = 0
    issue_ns: int = 0
    discard_issue_ns: int = 0


@dataclass(frozen=True, slots=True)
class Lifetime:
    """One version of one storage, from its first save to its end. All numbers except `nbytes` are indices of points.

    The storage can be copied from `copy_point` on. From `free_point` on it has no other holder, so that releasing it
    frees its memory. At `end_point` the graph has released it. `read[i]` is the point at which the operation that asked
    for it at `uses[i]` has read it: an operation first asks for everything that it saved, and then runs. `recompute` is
    None if the storage cannot be recomputed.
    """

    nbytes: int
    saves: tuple[int, ...]
    uses: tuple[int, ...]
    read: tuple[int, ...]
    copy_point: int
    free_point: int
    end_point: int
    recompute: Recompute | None = None


class KeptBeside:
    """A place beside the fields of a value for what a reader made of it once. It is no part of the value: it is not
    compared, copied or saved."""

    __slots__ = ("kept",)


@dataclass(frozen=True, slots=True)
class Recording(KeptBeside):
    """The recording of one step. `clock` names the clock of its times: "virtual", "device" or "host". `synchronizes`:
    the host waits for the device between this step and the next, so that it is never ahead when a step begins."""

    backend: str
    device_name: str
    device_bytes: int
    torch_version: str
    clock: str
    resident_bytes: int  # allocated when the step began
    parameter_bytes: int
    points: tuple[Point, ...]
    lifetimes: tuple[Lifetime, ...]
    synchronizes: bool = False

    @property
    def compute_ns(self) -> int:
        return sum(point.compute_ns for point in self.points)

    @property
    def issue_ns(self) -> int:
        """The time in which the host issues the step with everything kept; 0 if nothing is known of the host."""
        return sum(point.issue_ns for point in self.points)

    @property
    def kept_ns(self) -> int:
        """The step with everything kept: no plan has a shorter one. See [Note: The host lane] in
        csrc/planning/step_timeline.h."""
        host_ns = device_ns = 0
        for point in self.points:
            host_ns += point.issue_ns
            device_ns += point.compute_ns
            if self.synchronizes:
                device_ns = max(device_ns, host_ns)
        return max(device_ns, host_ns)

    def without_host(self) -> Recording:
        """The same step on a host that takes no time."""
        return self.with_issue_times(0) if self.has_host else self

    @property
    def has_host(self) -> bool:
        """True if something is known of the host."""
        return any(point.issue_ns for point in self.points)

    def with_issue_times(self, factor: float) -> Recording:
        """The same step on a host that takes `factor` times as long."""
        return replace(
            self,
            points=tuple(replace(point, issue_ns=round(point.issue_ns * factor)) for point in self.points),
            lifetimes=tuple(
                one
                if one.recompute is None
                else replace(
                    one,
                    recompute=replace(
                        one.recompute,
                        issue_ns=round(one.recompute.issue_ns * factor),
                        discard_issue_ns=round(one.recompute.discard_issue_ns * factor),
                    ),
                )
                for one in self.lifetimes
            ),
        )

    @property
    def peak_bytes(self) -> int:
        """The peak of the step with everything kept."""
        return max(point.peak_bytes for point in self.points)

    @property
    def managed_bytes(self) -> int:
        return sum(lifetime.nbytes for lifetime in self.lifetimes)

    def save(self, path: str | os.PathLike[str]) -> None:
        save_text(to_json(self, _FORM, _VERSION), path)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Recording:
        return load_file(path, Recording, _FORM, _VERSION)
