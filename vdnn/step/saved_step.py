"""SavedStep: one step as files in a folder: its recording, plan, timelines, the reasons for the plan's actions, and
which steps of its session followed which plans.

A run is a folder with such steps below `steps/`, and vdnn.report reads it. Each file holds one value in its own form.
Any file may be missing: a step may have no plan, and a plan may never have run.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from vdnn.errors import InvalidArgumentError
from vdnn.step.json_form import load_file, save_text, to_json
from vdnn.step.plan import Action, Plan
from vdnn.step.plan_use import PlanUse
from vdnn.step.recording import Recording
from vdnn.step.timeline import Timeline

STEPS_FOLDER = "steps"

_FORM, _VERSION = "vdnn reasons", 1
_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a storage got its action: the next best action would make the step longer by `more_ns`. Both `second_best`
    and `more_ns` are None if no other action fits."""

    lifetime: int
    second_best: Action | None
    more_ns: int | None


@dataclass(frozen=True, slots=True)
class Reasons:
    """The reasons for some storages of one plan."""

    storages: tuple[Reason, ...]

    def save(self, path: str | os.PathLike[str]) -> None:
        save_text(to_json(self, _FORM, _VERSION), path)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Reasons:
        return load_file(path, Reasons, _FORM, _VERSION)


@dataclass(frozen=True, slots=True)
class SavedStep:
    """`recording` describes the step with everything kept; `predicted` and `measured` describe it under `plan`.
    `plan_use` is about all steps of its session."""

    name: str
    recording: Recording | None = None
    plan: Plan | None = None
    predicted: Timeline | None = None
    measured: Timeline | None = None
    reasons: Reasons | None = None
    plan_use: PlanUse | None = None

    def save(self, run: str | os.PathLike[str]) -> Path:
        """Save into the folder of a run, which is created if missing. Replaces a saved step of the same name."""
        _require_folder_name(self.name)
        folder = Path(run) / STEPS_FOLDER / self.name
        folder.mkdir(parents=True, exist_ok=True)
        for name, value in self._files().items():
            if value is None:
                (folder / name).unlink(missing_ok=True)
            else:
                value.save(folder / name)
        return folder

    def _files(self) -> dict[str, Recording | Plan | Timeline | Reasons | PlanUse | None]:
        return {
            "recording.json": self.recording,
            "plan.json": self.plan,
            "predicted.json": self.predicted,
            "measured.json": self.measured,
            "reasons.json": self.reasons,
            "plan_use.json": self.plan_use,
        }

    @staticmethod
    def load(folder: str | os.PathLike[str]) -> SavedStep:
        """Load a step from its folder. A folder without any of the files gives an empty step."""
        path = Path(folder)
        return SavedStep(
            path.name,
            _load_if_present(path / "recording.json", Recording.load),
            _load_if_present(path / "plan.json", Plan.load),
            _load_if_present(path / "predicted.json", Timeline.load),
            _load_if_present(path / "measured.json", Timeline.load),
            _load_if_present(path / "reasons.json", Reasons.load),
            _load_if_present(path / "plan_use.json", PlanUse.load),
        )

    @property
    def is_empty(self) -> bool:
        return all(value is None for value in self._files().values())


def _load_if_present(path: Path, load: Callable[[Path], _Value]) -> _Value | None:
    return load(path) if path.is_file() else None


def _require_folder_name(name: str) -> None:
    if not name or name.startswith(".") or any(letter in "/\\" or not letter.isprintable() for letter in name):
        raise InvalidArgumentError(
            argument="the name of a step",
            expected="a name for its folder, such as 'resnet50 60%', without a slash and without a leading dot",
            got=repr(name),
        )
