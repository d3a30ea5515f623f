"""Stored plans: the files of a plan folder, which the next runs of a training follow, and what a session has in them.

A training is known by its facts (the card, the budget, the options that change plans) and by the structure of its
model. Both are in the name of its file, so other trainings have files of their own, and so has each model of a session.
The versions of vdnn and torch are not: a file of another version is refused and replaced. The folder is bounded: files
that were not used for longest are removed. Nothing here ends a training: a file that cannot be read or written costs
one sentence.

The plan tables of a model are read when a step of it begins for the first time, and written after a step without a new
plan. Kinds of steps are hashes that differ from process to process: they are computed again from the saves of a
recorded step.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import re
import secrets
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

from vdnn.bytesize import exact_bytes
from vdnn.errors import FormatError, VdnnError
from vdnn.planning.planned_step import PlannedStep
from vdnn.planning.recomputing import recording_under
from vdnn.planning.simulate import simulate_followed
from vdnn.runtime.steps.kinds import Begin, Kind
from vdnn.runtime.steps.plan_table import PlanOrigin, PlanTable, SizedPlan
from vdnn.runtime.steps.planner import BudgetPlanner
from vdnn.runtime.steps.save_keys import SaveKeys
from vdnn.runtime.steps.size_model import RecordedSizes
from vdnn.runtime.storage.transport import Transport
from vdnn.step.json_form import PARTIAL
from vdnn.step.recording import Recording
from vdnn.step.stored_plans import (
    Fact,
    StoredHeader,
    StoredPlans,
    StoredRecording,
    StoredSizedPlan,
    StoredTable,
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


class TrainingIdentity(NamedTuple):
    """Identifies the plans of one model. `model` is the name of its class."""

    model: str
    structure: tuple[str, ...]
    facts: tuple[Fact, ...]

    @property
    def file_name(self) -> str:
        known_by = json.dumps([self.structure, [(one.name, one.value) for one in self.facts]])
        name = re.sub(r"[^A-Za-z0-9_]+", "_", self.model)[:64]
        return f"{name}-{hashlib.sha256(known_by.encode()).hexdigest()[:16]}{_END}"


class Loaded(NamedTuple):
    """The stored plans of a training; None with a sentence that says why there are none."""

    plans: StoredPlans | None
    sentence: str


@dataclass(frozen=True, slots=True)
class PlanFolder:
    """`facts`: those that the options of the session give. `follows_recomputes`: rechecks find a recipe that is wrong
    where it is followed for the first time in a process. `ranks`: the number of ranks with files in it. Each may have
    as many files as a folder without ranks."""

    path: Path
    vdnn_version: str
    facts: tuple[Fact, ...] = ()
    follows_recomputes: bool = True
    ranks: int = 1

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

    def load(self, training: TrainingIdentity) -> Loaded:
        """The stored plans of this training. Says so in the log if there are some that are refused."""
        path = self.path / training.file_name
        try:
            header, body = read_file(path)
            difference = _version_difference(header, self.vdnn_version)
            if difference is None:
                with contextlib.suppress(OSError):
                    os.utime(path)  # it was used
                return Loaded(unpacked(path, body), "")
        except FileNotFoundError:
            return self._none(training)
        except FormatError as error:
            return refused(f"{error} Plans are made anew.")
        except OSError as error:
            return refused(f"stored plans cannot be read from {path} ({_reason(error)}). Plans are made anew.")
        return refused(f"stored plans in {path} are {difference}. Plans are made anew.")

    def store(self, training: TrainingIdentity, plans: StoredPlans) -> bool:
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

    def forget(self, training: TrainingIdentity) -> None:
        """Removes the stored plans of this training."""
        with contextlib.suppress(OSError):
            (self.path / training.file_name).unlink(missing_ok=True)

    def _none(self, training: TrainingIdentity) -> Loaded:
        """There is no file of this training. Names the difference to the most similar file."""
        differences = [one for one in (_difference(path, training) for path in self._files()) if one is not None]
        if not differences:
            return Loaded(None, f"no stored plans in {self.path} yet")
        number, sentence = min(differences)
        more = f" and {number - 1} more" if number > 1 else ""
        found = Loaded(None, f"no stored plans of this training in {self.path}: the nearest differ in {sentence}{more}")
        logger.info("vdnn: %s. Plans are made anew.", found.sentence)
        return found

    def _files(self) -> Iterator[Path]:
        with contextlib.suppress(OSError):
            yield from sorted(self.path.glob(f"*{_END}"))

    def _remove_oldest(self) -> None:
        """Removes files beyond the bounds, and those that an interrupted process left."""
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
            if number and (number >= _MOST_FILES * self.ranks or used_bytes > _MOST_BYTES * self.ranks):
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)


def refused(sentence: str) -> Loaded:
    logger.warning("vdnn: %s", sentence)
    return Loaded(None, sentence.rstrip("."))


def card_facts(name: str, total_bytes: int) -> tuple[Fact, Fact]:
    """The facts of the card that a training runs on."""
    return Fact("card", name), Fact("its memory", exact_bytes(total_bytes))


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


def _difference(path: Path, training: TrainingIdentity) -> tuple[int, str] | None:
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


_MOST_TABLES = 8


class Restored(NamedTuple):
    """A plan table of an earlier run. `keys` are those of a recorded step of its kind."""

    keys: SaveKeys
    table: PlanTable


class _Model:
    """The file of one model, and the plan tables in it that no step of this run has asked for yet."""

    def __init__(self, training: TrainingIdentity, found: StoredPlans | None) -> None:
        self.training = training
        self.found = found
        self.waiting = [] if found is None else list(range(len(found.tables)))
        self.written: StoredPlans | None = found
        self.is_followed = False


class PlanStore:
    """The stored plans of one session. `lines` are for its report."""

    def __init__(self, folder: PlanFolder, planner: BudgetPlanner) -> None:
        self.lines: list[str] = []
        self._folder = folder
        self._planner = planner
        self._models: dict[int, _Model] = {}  # by Begin.model
        self._is_off = False

    # From the folder.

    def restored(
        self, begin: Begin, model: torch.nn.Module | None, transport: Transport
    ) -> tuple[list[Restored], list[int]]:
        """The plan tables of steps with this begin, and their numbers in the order in which steps followed them
        last."""
        known = self._models.get(begin.model)
        if known is None:
            known = self._models[begin.model] = self._load(model, transport)
        if known.found is None:
            return [], []
        restored: dict[int, Restored] = {}
        try:
            for number, stored in enumerate(known.found.tables):
                one = self._table(known.found, stored, begin)
                if one is not None:
                    restored[number] = one
        except (VdnnError, ValueError, TypeError, LookupError, RuntimeError) as error:
            self._refuse(known, f"cannot be followed ({error})")
            known.found, known.waiting = None, []
            return [], []
        if not known.is_followed:
            self._say(known, begin, is_followed=bool(restored))
        known.waiting = [number for number in known.waiting if number not in restored]
        numbers = {number: position for position, number in enumerate(restored)}
        return list(restored.values()), [numbers[one] for one in known.found.order if one in numbers]

    def _say(self, known: _Model, begin: Begin, *, is_followed: bool) -> None:
        form = begin.form
        if is_followed:
            known.is_followed = True
            self.lines.append(f"follows stored plans of an earlier run: {self._path(known)}")
            logger.info("vdnn: %s", self.lines[-1])
        elif not begin.is_later:
            where = f"{form.producer or 'a leaf'} in {form.module or 'no module'}, {form.dtype}"
            self._refuse(known, f"have none for a step that begins with {where}")

    def _refuse(self, known: _Model, problem: str) -> None:
        found = refused(f"stored plans in {self._path(known)} {problem}. Plans are made anew.")
        self.lines.append(found.sentence)

    def _load(self, model: torch.nn.Module | None, transport: Transport) -> _Model:
        info = transport.device.info
        training = TrainingIdentity(
            *structure_of(model), (*card_facts(info.name, info.total_bytes), *self._folder.facts)
        )
        found = self._folder.load(training)
        plans, sentence = found
        if plans is not None and not self._may_recompute(transport) and _recomputes(plans):
            plans, sentence = refused(
                f"stored plans in {self._folder.path / training.file_name} recompute, and without rechecks or with a "
                "tolerance nothing would prove that at its first use. Plans are made anew."
            )
        if plans is None:
            self.lines.append(sentence)
        return _Model(training, plans)

    def _may_recompute(self, transport: Transport) -> bool:
        has_checks = transport.fake or transport.integrity is not None or transport.has_kernels
        return self._folder.follows_recomputes and has_checks

    def _table(self, plans: StoredPlans, stored: StoredTable, begin: Begin) -> Restored | None:
        """The plan table, or None if its steps begin in another way."""
        recordings = [plans.recordings[one.recording] for one in stored.recorded]
        if stored.is_later != begin.is_later:
            return None
        largest = max(recordings, key=lambda one: one.managed_bytes)
        keys = keys_of(largest, begin)
        if keys.begin != begin:
            return None
        sizes = [(recordings[i], one.has_own_recomputes, one.is_warm_up) for i, one in enumerate(stored.recorded)]
        table = PlanTable(RecordedSizes.of(sizes))
        table.records_all = stored.records_all
        for one in stored.plans:
            table.add(self._sized_plan(plans.recordings[one.recording], one))
        return Restored(keys, table)

    def _sized_plan(self, recording: Recording, stored: StoredSizedPlan) -> SizedPlan:
        planner, plan, timeline = self._planner, stored.plan, stored.timeline
        planner.require_host(plan)
        followed = recording_under(recording, plan.lifetimes)
        predicted = simulate_followed(followed, plan, planner.costs(timeline))
        planned = PlannedStep(recording, plan, followed, predicted, None, 0.0)
        sized_plan = SizedPlan(planned, recording, timeline, PlanOrigin(stored.source))
        sized_plan.tightened_bytes, sized_plan.is_over_somewhere = stored.tightened_bytes, stored.is_over_somewhere
        sized_plan.is_stored = True
        for first in stored.served:
            sized_plan.served(first)
        return sized_plan

    # To the folder.

    def store(self, tables: dict[Kind, PlanTable], begins: dict[Kind, Begin], order: Iterable[Kind]) -> None:
        """Writes the files of the models whose plan tables have changed."""
        if self._is_off:
            return
        for model, known in self._models.items():
            mine = {kind: one for kind, one in tables.items() if begins[kind].model == model and _is_worth(one)}
            if not mine:
                continue
            plans = _stored(known, mine, begins, order)
            if plans == known.written:
                continue
            if not self._folder.store(known.training, plans):
                self._is_off = True
                return
            known.written = plans

    def forget(self) -> None:
        """Removes the files of this session, and writes none any more: a plan gave a wrong value."""
        self._is_off = True
        for known in self._models.values():
            self._folder.forget(known.training)

    def _path(self, known: _Model) -> str:
        return str(self._folder.path / known.training.file_name)


def keys_of(recording: Recording, begin: Begin) -> SaveKeys:
    """The save keys of a recorded step, as they were while it ran."""
    keys = SaveKeys(is_later=begin.is_later)
    for point in recording.points:
        if point.key is None:
            continue
        nbytes = math.prod(point.key.size) * getattr(torch, point.key.dtype).itemsize
        if keys.first is None:
            keys.begin_with(point.key, begin.model, nbytes)
        else:
            keys.add(point.key, nbytes)
    return keys


def _recomputes(plans: StoredPlans) -> bool:
    return any(
        one.is_recomputed for table in plans.tables for sized_plan in table.plans for one in sized_plan.plan.lifetimes
    )


def _is_worth(table: PlanTable) -> bool:
    """True if a step after the warm-up was planned."""
    return any(sized_plan.origin is not PlanOrigin.WARM_UP for sized_plan in table.plans)


class _Numbers:
    """Numbers recordings in the order in which they come. Equal ones have one number."""

    def __init__(self) -> None:
        self.recordings: dict[int, tuple[int, Recording]] = {}  # by identity

    def of(self, recording: Recording) -> int:
        return self.recordings.setdefault(id(recording), (len(self.recordings), recording))[0]


def _stored(
    known: _Model, tables: dict[Kind, PlanTable], begins: dict[Kind, Begin], order: Iterable[Kind]
) -> StoredPlans:
    numbers, stored = _Numbers(), []
    kinds = sorted(tables, key=lambda kind: -tables[kind].last_used)[:_MOST_TABLES]
    for kind in kinds:
        table = tables[kind]
        recorded = [StoredRecording(numbers.of(one), own, early) for one, own, early in table.recorded.all()]
        plans = [
            _stored_plan(sized_plan, numbers)
            for sized_plan in table.plans
            if sized_plan.origin is not PlanOrigin.WARM_UP
        ]
        stored.append(StoredTable(begins[kind].is_later, table.records_all, tuple(recorded), tuple(plans)))
    for number in known.waiting[: _MOST_TABLES - len(stored)]:
        if known.found is not None:
            stored.append(_moved(known.found, known.found.tables[number], numbers))
    places = {kind: number for number, kind in enumerate(kinds)}
    recordings = tuple(one for _, one in numbers.recordings.values())
    return StoredPlans(recordings, tuple(stored), tuple(places[kind] for kind in order if kind in places))


def _stored_plan(sized_plan: SizedPlan, numbers: _Numbers) -> StoredSizedPlan:
    timeline = None if sized_plan.timeline is None else replace(sized_plan.timeline, marks=())
    return StoredSizedPlan(
        numbers.of(sized_plan.recording),
        sized_plan.executor.plan,
        timeline,
        sized_plan.origin.value,
        sized_plan.tightened_bytes,
        sized_plan.is_over_somewhere,
        tuple(sized_plan.larger_steps),
    )


def _moved(plans: StoredPlans, table: StoredTable, numbers: _Numbers) -> StoredTable:
    """A plan table of another file, with its recordings numbered as in this one."""
    return replace(
        table,
        recorded=tuple(replace(one, recording=numbers.of(plans.recordings[one.recording])) for one in table.recorded),
        plans=tuple(replace(one, recording=numbers.of(plans.recordings[one.recording])) for one in table.plans),
    )
