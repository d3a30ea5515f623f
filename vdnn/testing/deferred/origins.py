"""Where in its program a thread is: a short stack, without torch's frames and ours.

In a backward, torch's own thread has no frames of the program: then it says of which operation's backward, and who
called it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

import torch

_DEEPEST = 3
_PACKAGES = tuple(f"{Path(file).parent}/" for file in (torch.__file__, sys.modules["vdnn"].__file__) if file)


def program_origin() -> str:
    """Of the calling thread, as "step.py:12 in forward < train.py:30 in main"; "" if the program is not to be seen."""
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
    for frame in sys._current_frames().values():
        looked_at: FrameType | None = frame
        while looked_at is not None and looked_at.f_code.co_filename.startswith(_PACKAGES):
            if looked_at.f_code.co_name == "_engine_run_backward":
                return _program_frames(looked_at)
            looked_at = looked_at.f_back
    return ""
