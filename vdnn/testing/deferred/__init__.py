"""The deferred accelerator: the asynchrony of a GPU on CPU cores. See docs/deferred.md."""

from __future__ import annotations

from vdnn.testing.deferred.deferred_accelerator import DeferredAccelerator, Mode
from vdnn.testing.deferred.exploration import explore
from vdnn.testing.deferred.extension import load_extension

__all__ = ["DeferredAccelerator", "Mode", "explore", "load_extension"]
