"""The deferred accelerator: a torch device that computes later, as a GPU does, on CPU cores. See docs/deferred.md.

It needs torch, a C++ compiler and a checkout: the package that users install does not contain it.
"""

from __future__ import annotations

from deferred.deferred_accelerator import DeferredAccelerator, Mode
from deferred.exploration import explore
from deferred.extension import load_extension

__all__ = ["DeferredAccelerator", "Mode", "explore", "load_extension"]
