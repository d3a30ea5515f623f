"""StoredPlans: the plans of one training as a file, for the next run of it.

The file begins with a line of JSON, its header: the versions, what the training is known by (its options and the
structure of its model), and the digest of the rest. The rest is compressed JSON: recorded steps, and the plans made
from them. A file that was cut off or changed is refused, and so is one of another version.
"""

from __future__ import annotations

import hashlib
import secrets
import zlib
from dataclasses import dataclass
from pathlib import Path

from vdnn.errors import FormatError, VdnnError
from vdnn.step.json_form import from_json, save_bytes, to_json
from vdnn.step.plan import Plan
from vdnn.step.recording import Recording, SaveKey
from vdnn.step.timeline import Timeline

_FORM, _VERSION = "vdnn stored plans", 2
_LEVEL = 1  # of the compression
_MOST_HEADER_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Fact:
    """A fact that a training is known by, such as its budget."""

    name: str
    value: str


@dataclass(frozen=True, slots=True)
class StoredHeader:
    """The part of the file that is read before anything else. `structure` has a line for each module and parameter of
    the model."""

    vdnn_version: str
    torch_version: str
    facts: tuple[Fact, ...]
    structure: tuple[str, ...]
    digest: str


@dataclass(frozen=True, slots=True)
class StoredRecording:
    """A recorded step, by its number in the file."""

    recording: int
    has_own_recomputes: bool
    is_warm_up: bool


@dataclass(frozen=True, slots=True)
class StoredSizedPlan:
    """A plan, and the step that it was made from, by its number in the file. `timeline` has the copies by which rates
    of the link were measured, and no marks."""

    recording: int
    plan: Plan
    timeline: Timeline | None
    source: str
    tightened_bytes: int
    is_over_somewhere: bool
    served: tuple[SaveKey, ...]


@dataclass(frozen=True, slots=True)
class StoredTable:
    """The recorded steps and plans of one kind. `is_later`: its micro-batches are not the first of their step."""

    is_later: bool
    records_all: bool
    recorded: tuple[StoredRecording, ...]
    plans: tuple[StoredSizedPlan, ...]


@dataclass(frozen=True, slots=True)
class StoredPlans:
    """The contents of a file behind its header. `order`: the numbers of the tables that the last steps followed."""

    recordings: tuple[Recording, ...]
    tables: tuple[StoredTable, ...]
    order: tuple[int, ...]


def packed(plans: StoredPlans) -> bytes:
    """The part of a file behind its header."""
    return zlib.compress(to_json(plans, _FORM, _VERSION).encode(), _LEVEL)


def digest_of(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


def write_file(path: Path, header: StoredHeader, body: bytes) -> None:
    """Writes a file whole or not at all, whoever else writes it at the same time. `header` has the digest of `body`."""
    save_bytes(to_json(header, _FORM, _VERSION).encode() + b"\n" + body, path, secrets.token_hex(4))


def read_header(path: Path) -> StoredHeader:
    """Raises OSError, or FormatError for a file that is not one of this version."""
    with path.open("rb") as file:
        return _header_of(path, file.readline(_MOST_HEADER_BYTES))


def read_file(path: Path) -> tuple[StoredHeader, bytes]:
    """The header, and the part behind it. The same errors, and one for a file that was changed after it was written."""
    with path.open("rb") as file:
        header, body = _header_of(path, file.readline(_MOST_HEADER_BYTES)), file.read()
    if digest_of(body) != header.digest:
        raise FormatError(where=str(path), problem="it was changed or cut off after it was written.")
    return header, body


def unpacked(path: Path, body: bytes) -> StoredPlans:
    try:
        return from_json(zlib.decompress(body).decode(), StoredPlans, _FORM, _VERSION)
    except (zlib.error, UnicodeDecodeError, VdnnError) as error:
        raise FormatError(where=str(path), problem=str(error)) from None


def _header_of(path: Path, line: bytes) -> StoredHeader:
    try:
        return from_json(line.decode(), StoredHeader, _FORM, _VERSION)
    except (UnicodeDecodeError, VdnnError) as error:
        raise FormatError(where=str(path), problem=str(error)) from None
