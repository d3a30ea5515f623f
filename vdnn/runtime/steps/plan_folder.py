"""A plan folder: the files with stored plans that the next runs of trainings follow.

A training is known by its facts (the card, the budget, the options that change plans) and by the structure of its
model. Both are in the name of its file, so other trainings have files of their own. The versions of vdnn and torch are
not: a file of another version is refused and replaced. The folder is bounded: files that were not used for longest are
removed.

Nothing here ends a training. A file that cannot be read or written costs one sentence.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from vdnn.errors import FormatError
from vdnn.step.json_form import PARTIAL
from vdnn.step.stored_plans import (
    Fact,
    StoredHeader,
    StoredPlans,
    digest_of,
    packed,
    read_file,
    read_header,
    unpacked,
    write_file,
)
from vdnn.user_warnings import warn

logger = logging.getLogger("vdnn")

_END = ".plans"
_MOST_FILES = 64
_MOST_BYTES = 256 << 20
_OLD_PARTIAL_S = 3600  # a file that was being written so long ago never will be


class Training(NamedTuple):
    """Identifies the plans of one model. `model` is the name of its class."""

    model: str
    structure: tuple[str, ...]
    facts: tuple[Fact, ...]

    @property
    def file_name(self) -> str:
        known_by = json.dumps([self.structure, [(one.name, one.value) for one in self.facts]])
        name = re.sub(r"[^A-Za-z0-9_]+", "_", self.model)[:64]
        return f"{name}-{hashlib.sha256(known_by.encode()).hexdigest()[:16]}{_END}"


class Found(NamedTuple):
    """The stored plans of a training; None with a sentence that says why there are none."""

    plans: StoredPlans | None
    sentence: str


@dataclass(frozen=True, slots=True)
class PlanFolder:
    """`facts`: those that the options of the session give. `follows_recomputes`: rechecks find a recipe that is wrong
    where it is followed for the first time in a process."""

    path: Path
    vdnn_version: str
    facts: tuple[Fact, ...] = ()
    follows_recomputes: bool = True

    @property
    def is_usable(self) -> bool:
        """True if files can be written. Makes the folder. Warns otherwise."""
        probe = self.path / f".{secrets.token_hex(4)}{PARTIAL}"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            probe.write_bytes(b"")
            probe.unlink()
        except OSError as error:
            warn(f"plans: the folder {str(self.path)!r} cannot be written ({_reason(error)}). No plan is stored.")
            return False
        return True

    def load(self, training: Training) -> Found:
        """The stored plans of this training. Says so in the log if there are some that are refused."""
        path = self.path / training.file_name
        try:
            header, body = read_file(path)
            difference = _version_difference(header, self.vdnn_version)
            if difference is None:
                with contextlib.suppress(OSError):
                    os.utime(path)  # it was used
                return Found(unpacked(path, body), "")
        except FileNotFoundError:
            return self._none(training)
        except FormatError as error:
            return refused(f"{error} Plans are made anew.")
        except OSError as error:
            return refused(f"stored plans cannot be read from {path} ({_reason(error)}). Plans are made anew.")
        return refused(f"stored plans in {path} are {difference}. Plans are made anew.")

    def store(self, training: Training, plans: StoredPlans) -> bool:
        """Replaces the stored plans of this training. False, with a warning, if that is not possible."""
        body = packed(plans)
        version = str(torch.__version__)
        header = StoredHeader(self.vdnn_version, version, training.facts, training.structure, digest_of(body))
        try:
            write_file(self.path / training.file_name, header, body)
        except OSError as error:
            warn(f"plans: {str(self.path)!r} cannot be written any more ({_reason(error)}). No plan is stored.")
            return False
        self._remove_oldest()
        return True

    def forget(self, training: Training) -> None:
        """Removes the stored plans of this training."""
        with contextlib.suppress(OSError):
            (self.path / training.file_name).unlink(missing_ok=True)

    def _none(self, training: Training) -> Found:
        """There is no file of this training. Names the difference to the most similar file."""
        differences = [one for one in (_difference(path, training) for path in self._files()) if one is not None]
        if not differences:
            return Found(None, f"no stored plans in {self.path} yet")
        number, sentence = min(differences)
        more = f" and {number - 1} more" if number > 1 else ""
        found = Found(None, f"no stored plans of this training in {self.path}: the nearest differ in {sentence}{more}")
        logger.info("vdnn: %s. Plans are made anew.", found.sentence)
        return found

    def _files(self) -> Iterator[Path]:
        with contextlib.suppress(OSError):
            yield from sorted(self.path.glob(f"*{_END}"))

    def _remove_oldest(self) -> None:
        """Removes what is beyond the bounds, and what an interrupted process left."""
        with contextlib.suppress(OSError):
            for path in self.path.glob(f".*{_END}.*{PARTIAL}"):
                if time.time() - path.stat().st_mtime > _OLD_PARTIAL_S:
                    path.unlink(missing_ok=True)
        found = []
        for path in self._files():
            with contextlib.suppress(OSError):  # another process has removed it
                facts = path.stat()
                found.append((facts.st_mtime, facts.st_size, path))
        used_bytes = 0
        for number, (_, nbytes, path) in enumerate(sorted(found, reverse=True)):
            used_bytes += nbytes
            if number and (number >= _MOST_FILES or used_bytes > _MOST_BYTES):
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)


def refused(sentence: str) -> Found:
    logger.warning("vdnn: %s", sentence)
    return Found(None, sentence.rstrip("."))


def _reason(error: OSError) -> str:
    return error.strerror or type(error).__name__


def _version_difference(header: StoredHeader, vdnn_version: str) -> str | None:
    for name, stored, now in (
        ("vdnn", header.vdnn_version, vdnn_version),
        ("torch", header.torch_version, str(torch.__version__)),
    ):
        if stored != now:
            return f"of {name} {stored}, and this is {name} {now}"
    return None


def _difference(path: Path, training: Training) -> tuple[int, str] | None:
    """How many facts and lines of the structure differ, and the first one; None for a file that cannot be read."""
    try:
        header = read_header(path)
    except (OSError, FormatError):
        return None
    stored = {one.name: one.value for one in header.facts}
    now = {one.name: one.value for one in training.facts}
    differing = [
        f"{name} ({stored.get(name, 'none')}, now {now.get(name, 'none')})"
        for name in stored | now
        if stored.get(name) != now.get(name)
    ]
    before, after = dict(_lines(header.structure)), dict(_lines(training.structure))
    differing += [
        f"the model: {name or 'its class'} ({before.get(name, 'none')}, now {after.get(name, 'none')})"
        for name in before | after
        if before.get(name) != after.get(name)
    ]
    return (len(differing), differing[0]) if differing else None


def _lines(structure: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    for line in structure:
        name, _, what = line.partition(": ")
        yield name, what


def structure_of(model: torch.nn.Module | None) -> tuple[str, tuple[str, ...]]:
    """The name of a model's class, and a line for each of its modules and parameters. Without a model nothing is known
    of it: the steps themselves tell."""
    if model is None:
        return "no module", ()
    modules = [f"{name}: {type(one).__qualname__}" for name, one in model.named_modules()]
    parameters = [
        f"{name}: {str(one.dtype).removeprefix('torch.')} {list(one.shape)}{'' if one.requires_grad else ' frozen'}"
        for name, one in model.named_parameters()
    ]
    return type(model).__name__, (*modules, *parameters)
