"""A short stack of the calling thread, without the frames of torch, vdnn and the accelerator itself.

In a backward, torch's own thread has no frames of the program. The stack then names the operation whose backward runs,
and the caller of backward().
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

import torch

_DEEPEST = 3
_PACKAGES = tuple(f"{Path(file).parent}/" for file in (torch.__file__, sys.modules["vdnn"].__file__, __file__) if file)


def program_origin() -> str:
    """The calling thread's stack, as "step.py:12 in forward < train.py:30 in main". Empty if it has no such frames."""
    own = _program_frames(sys._getframe())
    node = torch._C._current_autograd_node()
    if node is None:
        return own
    backward = f"{node.name()} of {_caller_of_backward() or 'a backward'}"
    return f"{own} < {backward}" if own else backward


def _program_frames(frame: FrameType | None) -> str:
    found: list[str] = []
    while frame is not None and len(found) < _DEEPEST:
        code = frame.f_code
        if not code.co_filename.startswith((*_PACKAGES, "<frozen")):
            found.append(f"{code.co_filename}:{frame.f_lineno} in {code.co_name}")
        frame = frame.f_back
    return " < ".join(found)


def _caller_of_backward() -> str:
    """The program's frames of a thread that waits for a backward."""
    for innermost in sys._current_frames().values():
        frame: FrameType | None = innermost
        while frame is not None and frame.f_code.co_filename.startswith(_PACKAGES):
            if frame.f_code.co_name == "_engine_run_backward":
                return _program_frames(frame)
            frame = frame.f_back
    return ""
