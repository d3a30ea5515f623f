"""VdnnWarning: asks the user for a change. Events that vdnn handles by itself go to the logger `vdnn` instead.

warn() names the line of the user's program. It skips vdnn, the standard library and installed packages, since a session
is often opened by a trainer, and a save happens below modules of torch.
"""

from __future__ import annotations

import functools
import sys
import sysconfig
import warnings
from pathlib import Path


class VdnnWarning(UserWarning):
    """The category of every warning of this package. Each is shown at most once in a session."""


def warn(message: str) -> None:
    warnings.warn(f"vdnn: {message}", VdnnWarning, stacklevel=_level_of_user())


def line_of_user() -> str:
    """The file and line of the user's program that runs now."""
    frame = sys._getframe(_level_of_user() - 1)
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


@functools.cache
def _skipped() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    return (str(Path(__file__).parent), *(paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")))


def _level_of_user() -> int:
    """The stacklevel, for the caller, of the innermost frame of the user's program. If there is none, the stacklevel of
    the frame that called vdnn, such as a command of an installed package."""
    frame, level, outside = sys._getframe(1), 1, 0
    while frame.f_back is not None:
        frame, level = frame.f_back, level + 1
        file = frame.f_code.co_filename
        if not file.startswith((*_skipped(), "<frozen")):
            return level
        if not outside and not file.startswith(_skipped()[0]):
            outside = level
    return outside or level
