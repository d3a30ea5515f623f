"""Files with lines of JSON, to which a program that may be killed at any time adds one line after the other.

A last line that was cut off is ignored when the file is read, and removed when the next line is written.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

CELLS_FILE = "cells.jsonl"
LARGEST_FILE = "largest.jsonl"


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of the file. Raises ValueError if a line other than the last is not JSON."""
    if not path.exists():
        return []
    lines = path.read_bytes().decode("utf-8", errors="replace").split("\n")
    found = []
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            fields = json.loads(line)
        except ValueError:
            if number == len(lines):  # cut off: it has no end of line
                break
            raise ValueError(f"{path}, line {number}: expected JSON, got {line[:60]!r}. Remove the line.") from None
        if number < len(lines):
            found.append(fields)
    return found


def append_line(path: Path, fields: dict[str, Any]) -> None:
    """Append a line. It is on the disk when this returns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        _remove_cut_off(file)
        file.write(json.dumps(fields).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def _remove_cut_off(file: Any) -> None:
    """Remove everything after the last end of line."""
    file.seek(0)
    content = file.read()
    if content and not content.endswith(b"\n"):
        file.truncate(content.rfind(b"\n") + 1)
        file.seek(0, os.SEEK_END)
