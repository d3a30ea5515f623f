"""Which line of the user's program is running: the innermost frame outside torch and this package."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

import torch

_TORCH = str(Path(torch.__file__).parent) + "/"
_OURS = str(Path(__file__).parents[1]) + "/"
_OPTIMIZERS = f"{_TORCH}optim/"
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


def in_torch_optimizer() -> bool:
    """Torch's optimizers count their steps on the host: what they ask of a count stops no GPU."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_OPTIMIZERS):
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
