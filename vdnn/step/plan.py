"""Plan: what becomes of every storage of a step, with the points at which it is given up and brought back.

A plan carries the order of saves and uses it was made for, so that the runtime can follow it on another machine, notice
where a step differs, and say how. Points are indices into that order, as in the Recording.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import Enum

from vdnn.errors import VdnnError
from vdnn.step.json_form import load_file, save_text, to_json
from vdnn.step.recording import PointKind, Recording, SaveKey

_FORM, _VERSION = "vdnn plan", 3


class Action(Enum):
    """What happens to a storage."""

    KEEP = "keep"
    OFFLOAD = "offload"
    RECOMPUTE = "recompute"
    COMPRESS = "compress"


@dataclass(frozen=True, slots=True)
class PlannedPoint:
    """A save, a use, or the end of the step the plan was made for."""

    kind: PointKind
    lifetime: int | None
    key: SaveKey | None


@dataclass(frozen=True, slots=True)
class Absence:
    """At `release_point` a storage is given up: the first time the compute stream waits for its copy. At `reload_point`
    the copy back is issued; None: only when it is used."""

    release_point: int
    reload_point: int | None = None


@dataclass(frozen=True, slots=True)
class PlannedLifetime:
    """OFFLOAD has absences, in order; between two of them it is used. The others have none: what is to RECOMPUTE or to
    COMPRESS goes as soon as it can, and is made again when it is used first. What COMPRESS leaves is another lifetime,
    which may leave too."""

    nbytes: int
    action: Action
    absences: tuple[Absence, ...] = ()

    @property
    def is_rebuilt(self) -> bool:
        return self.action in (Action.RECOMPUTE, Action.COMPRESS)


@dataclass(frozen=True, slots=True)
class Plan:
    """For one step. Its points and lifetimes are those of the step with its rebuilds: what codecs leave comes behind
    what was recorded. `budget_bytes` is what it was made to stay under; None if for no budget."""

    policy: str
    backend: str
    device_name: str
    budget_bytes: int | None
    points: tuple[PlannedPoint, ...]
    lifetimes: tuple[PlannedLifetime, ...]

    def __post_init__(self) -> None:
        for index, lifetime in enumerate(self.lifetimes):
            if (lifetime.action is Action.OFFLOAD) is not bool(lifetime.absences):
                raise VdnnError(f"plan: lifetime {index} is to {lifetime.action.value}, with {lifetime.absences}.")
            self._require_order(index, lifetime)
        for index, place in enumerate(self.points):
            if place.lifetime is not None and not 0 <= place.lifetime < len(self.lifetimes):
                raise VdnnError(f"plan: point {index} names lifetime {place.lifetime} of {len(self.lifetimes)}.")

    def _require_order(self, index: int, lifetime: PlannedLifetime) -> None:
        last, before = len(self.points) - 1, -1
        for absence in lifetime.absences:
            back = absence.release_point + 1 if absence.reload_point is None else absence.reload_point
            if not before < absence.release_point < back <= last:
                raise VdnnError(
                    f"plan: lifetime {index} goes at {absence.release_point} and comes back at {absence.reload_point}, "
                    f"after {before}, and the last point is {last}."
                )
            before = back - 1

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
    """A plan for the step that was recorded."""
    points = tuple(PlannedPoint(point.kind, point.lifetime, point.key) for point in recording.points)
    return Plan(policy, recording.backend, recording.device_name, budget_bytes, points, lifetimes)
