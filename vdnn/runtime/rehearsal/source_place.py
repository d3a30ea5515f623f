"""Finds the line of the user's program that is running: the innermost frame outside torch and this package."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

import torch

_TORCH = str(Path(torch.__file__).parent) + "/"
_OURS = str(Path(__file__).parents[2]) + "/"
IN_TORCH = "inside torch"


def user_place() -> str:
    """The line as "file:line". A file of an installed package is named by the package, and one below the current
    directory relative to it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((_TORCH, _OURS, "<")) and "/contextlib.py" not in name:
            return f"{_shown(name)}:{frame.f_lineno}"
        frame = frame.f_back
    return IN_TORCH


def called_from_torch(package: str) -> bool:
    """True if a frame of this package of torch, such as "optim", is between the caller and the user's line."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(f"{_TORCH}{package}/"):
            return True
        if not name.startswith((_TORCH, _OURS, "<")):
            return False
        frame = frame.f_back
    return False


def _shown(name: str) -> str:
    path = Path(name.rpartition("/site-packages/")[2])
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return name
