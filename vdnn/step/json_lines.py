"""Files with one JSON value per line, to which a program that may be killed at any time adds lines.

A last line that was cut off is left out when the file is read, and removed when the next line is added. Any other line
that is not JSON is refused with a FormatError.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from vdnn.errors import FormatError


class JsonLines(NamedTuple):
    """`found`: each value with the number of its line. `cut_off`: the number of a last line that was cut off."""

    found: list[tuple[int, Any]]
    cut_off: int | None = None

    @property
    def values(self) -> list[Any]:
        return [value for _, value in self.found]


def read_json_lines(path: str | os.PathLike[str]) -> JsonLines:
    """The lines of the file that are not empty. A missing file has none."""
    file = Path(path)
    if not file.exists():
        return JsonLines([])
    try:
        lines = file.read_text(encoding="utf-8", errors="strict").split("\n")
    except UnicodeDecodeError as error:
        raise FormatError(
            where=str(path), problem=f"expected text in UTF-8, got an invalid byte at {error.start}."
        ) from None
    found = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            found.append((number, json.loads(line)))
        except ValueError as error:
            if number == len(lines):
                return JsonLines(found, number)
            raise FormatError(
                where=f"{path}, line {number}", problem=f"expected JSON, got {line[:60]!r}: {error}. Remove the line."
            ) from None
    return JsonLines(found)


def append_json_lines(path: str | os.PathLike[str], values: Iterable[object]) -> None:
    """Add lines. They are on the disk when this returns. Creates the file and its folder if missing."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with Path(path).open("ab+") as file:
        _end_last_line(file)
        file.write("".join(json.dumps(value) + "\n" for value in values).encode())
        file.flush()
        os.fsync(file.fileno())


def _end_last_line(file: BinaryIO) -> None:
    """Remove a last line that was cut off, so that the next one does not continue it."""
    file.seek(0)
    content = file.read()
    begin = content.rfind(b"\n") + 1
    if not content[begin:].strip():
        return
    try:
        json.loads(content[begin:])
    except ValueError:
        file.truncate(begin)
    else:
        file.write(b"\n")
    file.seek(0, os.SEEK_END)
