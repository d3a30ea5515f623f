"""Whether the native core is there, and one place that says so where it is not.

Who installs vdnn from a copy of the source and stays in that folder has the source before the installed package on
Python's path, and the source has no core until it is built in place.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

from vdnn.errors import CoreMissingError


def require_core() -> None:
    """Returns if vdnn._C can be found; else raises CoreMissingError."""
    if "vdnn._C" in sys.modules:
        return
    if find_spec("vdnn._C") is None:
        raise CoreMissingError(folder=str(Path(__file__).parent))
