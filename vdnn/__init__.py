"""vdnn: trains models whose activations do not fit the GPU, by moving them to pinned host memory and back.

Public names live here and nowhere else. Importing this package needs no torch, no GPU and no compiler; a name
that needs torch says so when it is touched.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from vdnn.bytesize import format_bytes, parse_bytes
from vdnn.errors import VdnnError
from vdnn.torch_requirement import require_torch

if TYPE_CHECKING:
    from vdnn.runtime.session import Session, keep, offload, paused

__version__ = "0.1.0.dev0"

__all__ = [
    "Session",
    "VdnnError",
    "__version__",
    "format_bytes",
    "keep",
    "offload",
    "parse_bytes",
    "paused",
    "require_torch",
]

# Names of the runtime. They are looked up when touched, so that `import vdnn` never imports torch.
_RUNTIME_NAMES = ("Session", "keep", "offload", "paused")


def __getattr__(name: str) -> object:
    if name in _RUNTIME_NAMES:
        require_torch()
        return getattr(importlib.import_module("vdnn.runtime.session"), name)
    raise AttributeError(f"module 'vdnn' has no attribute {name!r}")
