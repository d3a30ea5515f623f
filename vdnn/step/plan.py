"""Plan: the action for every storage of a step, with the points at which it is released and reloaded.

A plan contains the order of saves and uses that it was made for. The runtime can therefore follow it on another
machine, notice where a step differs, and report how. Points are indices into that order, as in the Recording.
A plan whose actions, points or lifetimes contradict each other is refused on construction.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import Enum

from vdnn.errors import InvalidArgumentError
from vdnn.step.json_form import load_file, save_text, to_json
from vdnn.step.recording import PointKind, Recording, SaveKey

_FORM, _VERSION = "vdnn plan", 3


class Action(Enum):
    """The decision for a lifetime."""

    KEEP = "keep"
    OFFLOAD = "offload"
    RECOMPUTE = "recompute"
    COMPRESS = "compress"


@dataclass(frozen=True, slots=True)
class PlannedPoint:
    """A save, a use, or the end of the step that the plan was made for."""

    kind: PointKind
    lifetime: int | None
    key: SaveKey | None


@dataclass(frozen=True, slots=True)
class Absence:
    """A time during which a storage is off the device.

    The storage is released at `release_point`, where the compute stream waits for the copy to the host. The reload is
    issued at `reload_point`. None means that the reload is issued on demand, at the use.
    """

    release_point: int
    reload_point: int | None = None


@dataclass(frozen=True, slots=True)
class PlannedLifetime:
    """The action for one lifetime.

    A lifetime to OFFLOAD has absences, in order, with a use between each two. The other actions have none: a storage to
    RECOMPUTE or COMPRESS is discarded as early as possible, and recomputed or decoded at its first use. The encoded
    bytes that COMPRESS keeps are a lifetime of their own, which may be offloaded.
    """

    nbytes: int
    action: Action
    absences: tuple[Absence, ...] = ()

    @property
    def is_recomputed(self) -> bool:
        return self.action in (Action.RECOMPUTE, Action.COMPRESS)


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan for one step.

    Its points and lifetimes are those of the step with its recomputes. The lifetimes of encoded bytes follow the
    recorded lifetimes. The plan was made to stay under `budget_bytes`; None if it was made without a budget.
    """

    policy: str
    backend: str
    device_name: str
    budget_bytes: int | None
    points: tuple[PlannedPoint, ...]
    lifetimes: tuple[PlannedLifetime, ...]

    def __post_init__(self) -> None:
        for index, lifetime in enumerate(self.lifetimes):
            if (lifetime.action is Action.OFFLOAD) is not bool(lifetime.absences):
                raise InvalidArgumentError(
                    argument="plan",
                    expected="absences for a lifetime to offload and for no other",
                    got=f"lifetime {index} to {lifetime.action.value} with absences {lifetime.absences}",
                )
            self._require_order(index, lifetime)
        for index, point in enumerate(self.points):
            if point.lifetime is not None and not 0 <= point.lifetime < len(self.lifetimes):
                raise InvalidArgumentError(
                    argument="plan",
                    expected=f"a lifetime below {len(self.lifetimes)} at point {index}",
                    got=str(point.lifetime),
                )

    def _require_order(self, index: int, lifetime: PlannedLifetime) -> None:
        last, previous = len(self.points) - 1, -1
        for absence in lifetime.absences:
            reload_point = absence.release_point + 1 if absence.reload_point is None else absence.reload_point
            if not previous < absence.release_point < reload_point <= last:
                raise InvalidArgumentError(
                    argument="plan",
                    expected=f"a release point and a later reload point, after {previous} and up to {last}",
                    got=f"lifetime {index}, which is released at point {absence.release_point} and reloaded at "
                    f"{absence.reload_point}",
                )
            previous = reload_point - 1

    @property
    def offloaded_bytes(self) -> int:
        return sum(one.nbytes for one in self.lifetimes if one.action is Action.OFFLOAD)

    def save(self, path: str | os.PathLike[str]) -> None:
        save_text(to_json(self, _FORM, _VERSION), path)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Plan:
        return load_file(path, Plan, _FORM, _VERSION)


def make_plan(
    recording: Recording, policy: str, lifetimes: tuple[PlannedLifetime, ...], budget_bytes: int | None = None
) -> Plan:
    """A plan with the points of the recorded step."""
    points = tuple(PlannedPoint(point.kind, point.lifetime, point.key) for point in recording.points)
    return Plan(policy, recording.backend, recording.device_name, budget_bytes, points, lifetimes)
