"""Reads hardware profiles from JSON files: those of the package, and the user's own.

A file holds "form", "version", "name", "description" and "figures", each figure as {"value": ..., "source": ...}. Copy
vdnn/hardware/profiles/titan-x.json to write another one. The folders in VDNN_HARDWARE_PATH are searched first, in their
order, so that figures measured on this machine take precedence over those of a datasheet. Files are read again at each
call. A file that is missing, incomplete or malformed is refused with an InvalidArgumentError.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vdnn.errors import InvalidArgumentError
from vdnn.hardware.hardware_profile import BY_CLASS, FRACTIONS, WHOLE_FIGURES, HardwareProfile

_FORM, _VERSION = "vdnn hardware profile", 1
# Objects of figures that a profile may lack.
_BY_NAME = ("host", "cards", "issue_ns", "libraries", "workspaces")
# Names the folders of the user's own profiles, separated as in PATH.
PATH_VARIABLE = "VDNN_HARDWARE_PATH"
_OWN_FOLDER = Path(__file__).parent / "profiles"


def load_profile(name_or_path: str | os.PathLike[str]) -> HardwareProfile:
    """Load a profile by its name, such as "titan-x", or from the JSON file at a path.

    A text that ends in ".json" or contains a separator is a path. Raises InvalidArgumentError, which is a ValueError,
    if the name or the file does not exist, and if the file is not a profile.
    """
    text = os.fspath(name_or_path)
    if isinstance(name_or_path, os.PathLike) or text.endswith(".json") or Path(text).name != text:
        return _read(Path(text))
    for folder in _folders():
        path = folder / f"{text}.json"
        if path.is_file():
            profile = _read(path)
            if profile.name != text:
                raise _refusal(path, "name", f"{text!r}, the name of the file", repr(profile.name))
            return profile
    known = ", ".join(profile_names())
    raise InvalidArgumentError(
        argument="hardware profile", expected=f"one of {known} or the path of a JSON file", got=repr(text)
    )


def profile_names() -> tuple[str, ...]:
    """The names that `load_profile` knows, in alphabetical order, including those from the user's own folders."""
    return tuple(sorted({path.stem for folder in _folders() for path in folder.glob("*.json")}))


def with_workspaces(name: str, workspaces: Mapping[str, int], source: str) -> str:
    """The JSON text of a profile of the package or of the user's folders, with these measured workspaces."""
    for folder in _folders():
        path = folder / f"{name}.json"
        if path.is_file():
            content = json.loads(path.read_text(encoding="utf-8"))
            table = {call: {"value": nbytes, "source": source} for call, nbytes in workspaces.items()}
            content["figures"]["workspaces"] = table
            _profile(path, content)
            return json.dumps(content, indent=2) + "\n"
    raise InvalidArgumentError(argument="hardware profile", expected=f"one of {', '.join(profile_names())}", got=name)


def _folders() -> Iterator[Path]:
    for folder in os.environ.get(PATH_VARIABLE, "").split(os.pathsep):
        if folder:
            yield Path(folder)
    yield _OWN_FOLDER


def _read(path: Path) -> HardwareProfile:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise _refusal(path, "file", "a readable profile", reason) from error
    except ValueError as error:  # not JSON, or not UTF-8
        raise _refusal(path, "file", "complete JSON", str(error)) from error
    if not isinstance(content, dict):
        raise _refusal(path, "file", "an object", type(content).__name__)
    for key, expected in (("form", _FORM), ("version", _VERSION)):
        if content.get(key) != expected:
            raise _refusal(path, key, repr(expected), repr(content.get(key)))
    return _profile(path, content)


def _profile(path: Path, content: dict[str, Any]) -> HardwareProfile:
    figures = content.get("figures")
    if not isinstance(figures, dict):
        raise _refusal(path, "figures", "an object", repr(figures))
    peaks = figures.get("flop_per_s")
    if not isinstance(peaks, dict):
        raise _refusal(path, "flop_per_s", "an object of figures by dtype", repr(peaks))
    unknown = sorted(set(figures) - {"flop_per_s", *_BY_NAME, *WHOLE_FIGURES, *FRACTIONS, *BY_CLASS})
    if unknown:
        raise _refusal(path, "figures", "only figures that a profile has", ", ".join(unknown))
    sources: dict[str, str] = {}
    values: dict[str, Any] = {}
    for name in (*WHOLE_FIGURES, *FRACTIONS):
        values[name] = _figure(path, name, figures.get(name), sources)
    for name in (*BY_CLASS, *_BY_NAME):
        values[name] = _figures_by_class(path, name, figures.get(name, {}), sources)
    flop_per_s = {dtype: _figure(path, f"flop_per_s.{dtype}", peak, sources) for dtype, peak in peaks.items()}
    return HardwareProfile(
        name=_text(path, "name", content),
        description=_text(path, "description", content),
        flop_per_s=flop_per_s,
        sources=sources,
        **values,
    )


def _figures_by_class(path: Path, name: str, figures: object, sources: dict[str, str]) -> dict[str, Any]:
    if not isinstance(figures, dict):
        raise _refusal(path, name, "an object of figures", repr(figures))
    return {key: _figure(path, f"{name}.{key}", figure, sources) for key, figure in figures.items()}


def _figure(path: Path, name: str, figure: object, sources: dict[str, str]) -> Any:
    """The value of one figure. Stores its source in `sources`. HardwareProfile checks the value."""
    if figure is None:
        raise _refusal(path, name, "a value and its source", "nothing")
    if not isinstance(figure, dict) or set(figure) != {"value", "source"}:
        raise _refusal(path, name, "a value and its source", json.dumps(figure))
    value, source = figure["value"], figure["source"]
    sources[name] = source if isinstance(source, str) else ""
    # Accept whole numbers written as 336e9, which JSON reads as a float.
    whole = isinstance(value, float) and math.isfinite(value) and value.is_integer() and not _is_fraction(name)
    return int(value) if whole else value


def _is_fraction(name: str) -> bool:
    return name in FRACTIONS or name.startswith("efficiency.")


def _text(path: Path, name: str, content: dict[str, Any]) -> str:
    text = content.get(name)
    if not isinstance(text, str) or not text.strip():
        raise _refusal(path, name, "a text", repr(text))
    return text


def _refusal(path: Path, part: str, expected: str, got: str) -> InvalidArgumentError:
    return InvalidArgumentError(argument=f"{path}, {part}", expected=expected, got=got)
