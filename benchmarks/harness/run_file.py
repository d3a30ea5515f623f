"""Lines of JSON that are added to one by one, by a program that may be killed at any time.

What was cut off in the middle is dropped when the next line is written, and left out when the file is read.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

CELLS_FILE = "cells.jsonl"
LARGEST_FILE = "largest.jsonl"


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Raises ValueError where a line other than the last is none of JSON."""
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
            if number == len(lines):  # no end of line behind it
                break
            raise ValueError(f"{path}, line {number}: expected JSON, got {line[:60]!r}. Take the line out.") from None
        if number < len(lines):
            found.append(fields)
    return found


def append_line(path: Path, fields: dict[str, Any]) -> None:
    """On the disk when it returns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        _drop_cut_off(file)
        file.write(json.dumps(fields).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def _drop_cut_off(file: Any) -> None:
    """Whatever is behind the last end of line."""
    file.seek(0)
    content = file.read()
    if content and not content.endswith(b"\n"):
        file.truncate(content.rfind(b"\n") + 1)
        file.seek(0, os.SEEK_END)
