"""The JSON form of Recording, Plan, Timeline and similar values: frozen dataclasses of numbers, text, enums and tuples,
or of other such dataclasses.

Every file names its form and its version. A truncated file, a file of another form and a file of another version are
refused with a FormatError. A field that has a default may be missing: the file is older than the field. Files are
written whole or not at all.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import os
import types
import typing
from pathlib import Path
from typing import Any, TypeVar

from vdnn.errors import FormatError, VdnnError

_Value = TypeVar("_Value")
PARTIAL = ".part"  # the end of the names of files that are being written


def to_json(value: object, form: str, version: int) -> str:
    """One JSON object with the form, the version and the fields of `value`."""
    return json.dumps({"form": form, "version": version, **_encode(value)}, indent=None, separators=(",", ":"))


def from_json(text: str, kind: type[_Value], form: str, version: int) -> _Value:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise FormatError(
            where=form, problem=f"expected JSON, got text that is not JSON or was cut off: {error}."
        ) from None
    if not isinstance(found, dict) or found.get("form") != form:
        named = found.get("form") if isinstance(found, dict) else type(found).__name__
        raise FormatError(where=form, problem=f"expected a JSON object with form {form!r}, got {named!r}.")
    if found.get("version") != version:
        raise FormatError(
            where=form,
            problem=f"expected version {version}, which this vdnn reads, got version {found.get('version')!r}: "
            "create the file again with this vdnn.",
        )
    fields = {name: held for name, held in found.items() if name not in ("form", "version")}
    value: _Value = _decode(fields, kind, form)
    return value


def load_file(path: str | os.PathLike[str], kind: type[_Value], form: str, version: int) -> _Value:
    """Read a value from a file. Every error names the path."""
    try:
        return from_json(Path(path).read_text(encoding="utf-8"), kind, form, version)
    except UnicodeDecodeError:
        raise FormatError(where=str(path), problem=f"{form}: expected text in UTF-8, got other bytes.") from None
    except VdnnError as error:
        raise FormatError(where=str(path), problem=str(error)) from None


def save_text(text: str, path: str | os.PathLike[str]) -> None:
    """Write to a temporary file and rename it, so that an interrupted write leaves the old file as it was."""
    save_bytes(text.encode("utf-8"), path, str(os.getpid()))


def save_bytes(content: bytes, path: str | os.PathLike[str], writer: str) -> None:
    """The same for bytes. `writer` tells those apart who may write the file at the same time."""
    target = Path(path)
    partial = target.with_name(f".{target.name}.{writer}{PARTIAL}")
    try:
        partial.write_bytes(content)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def _encode(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _encode(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, (tuple, list)):
        return [_encode(one) for one in value]
    return value


def _decode(found: Any, kind: Any, where: str) -> Any:
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        if found is None:
            return None
        (kind,) = (one for one in typing.get_args(kind) if one is not type(None))
        return _decode(found, kind, where)
    if origin is tuple:
        if not isinstance(found, list):
            raise FormatError(where=where, problem=f"expected a list, got {found!r}.")
        inner = typing.get_args(kind)[0]
        return tuple(
            one if type(one) is inner else _decode(one, inner, f"{where}[{index}]") for index, one in enumerate(found)
        )
    if dataclasses.is_dataclass(kind):
        return _decode_dataclass(found, kind, where)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        try:
            return kind(found)
        except ValueError:
            known = ", ".join(repr(member.value) for member in kind)
            raise FormatError(where=where, problem=f"expected one of {known}, got {found!r}.") from None
    if type(found) is not kind:
        raise FormatError(where=where, problem=f"expected {kind.__name__}, got {found!r}.")
    return found


def _decode_dataclass(found: Any, kind: Any, where: str) -> Any:
    if not isinstance(found, dict):
        raise FormatError(where=where, problem=f"expected an object, got {found!r}.")
    hints = _hints_of(kind)
    if found.keys() != hints.keys():
        later = {field.name for field in dataclasses.fields(kind) if field.default is not dataclasses.MISSING}
        missing = sorted(set(hints) - set(found) - later)
        unknown = sorted(set(found) - set(hints))
        if missing or unknown:
            raise FormatError(where=where, problem=f"missing {missing or 'nothing'}, unknown {unknown or 'nothing'}.")

    def decoded(name: str, value: Any) -> Any:
        hint = hints[name]
        return value if type(value) is hint else _decode(value, hint, f"{where}.{name}")

    return kind(**{name: decoded(name, value) for name, value in found.items()})


@functools.cache
def _hints_of(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)
