"""Checks that the native core and torch can be imported, and raises an error with instructions if not.

`import vdnn` works without torch: the planner, the doctor and the native core do not need it. So torch is imported by
name, inside a function, when the runtime is first used (docs/decisions/0001-torch-is-a-runtime-dependency-only.md).
The core is missing if Python finds a source folder that was not built before it finds the installed package.
"""

from __future__ import annotations

import importlib
import re
import sys
from importlib.util import find_spec
from pathlib import Path

from vdnn.errors import CoreMissingError, TorchMissingError

NEEDED = "torch>=2.10"
_OLDEST = (2, 10)


def require_core() -> None:
    """Raises CoreMissingError unless vdnn._C can be imported."""
    if "vdnn._C" in sys.modules:
        return
    if find_spec("vdnn._C") is None:
        raise CoreMissingError(folder=str(Path(__file__).parent))


def require_torch() -> None:
    """Raises TorchMissingError unless a torch that the runtime accepts can be imported."""
    version = torch_version()
    if not in_range(version):
        raise TorchMissingError(found=f"torch {version} is installed", needed=NEEDED)


def torch_version() -> str:
    """The version of the torch that an import gives. Raises TorchMissingError if the import fails for any reason, such
    as an OSError because its libraries do not load."""
    try:
        return str(importlib.import_module("torch").__version__)
    except ModuleNotFoundError as error:
        found = "no torch is installed" if error.name == "torch" else f"importing torch failed ({error})"
    except Exception as error:
        found = f"importing torch failed ({type(error).__name__}: {error})"
    raise TorchMissingError(found=found, needed=NEEDED)


def in_range(version: str) -> bool:
    """True if the runtime accepts `version`, such as "2.13.0+cpu". A version that cannot be parsed is accepted:
    development builds are usually newer than releases."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return match is None or (int(match[1]), int(match[2])) >= _OLDEST
