"""Which line of the user's program is running: the innermost frame outside torch and this package."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

import torch

_TORCH = str(Path(torch.__file__).parent) + "/"
_OURS = str(Path(__file__).parents[1]) + "/"
IN_TORCH = "inside torch"


def user_place() -> str:
    """file:line, from the current directory if it is below it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((_TORCH, _OURS, "<")) and "/contextlib.py" not in name:
            return f"{_shown(name)}:{frame.f_lineno}"
        frame = frame.f_back
    return IN_TORCH


def asked_by_torchs(room: str) -> bool:
    """Whether a file of that room of torch's, such as "optim", is between here and the user's line."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(f"{_TORCH}{room}/"):
            return True
        if not name.startswith((_TORCH, _OURS, "<")):
            return False
        frame = frame.f_back
    return False


def _shown(name: str) -> str:
    path = Path(name)
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return name
