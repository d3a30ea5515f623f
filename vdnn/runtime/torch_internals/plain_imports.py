"""Runs imports outside of all torch modes.

A library may be imported for the first time while a function makes a model. Under a mode its constants would become
tensors without data, which the module keeps: the next rehearsal lacks their bytes, and the program that continues
afterwards finds no values in them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from importlib.machinery import SourceFileLoader
from types import ModuleType

import torch
from torch.utils._python_dispatch import _disable_current_modes


@contextlib.contextmanager
def imports_without_modes(on_imported: Callable[[ModuleType], None] = lambda module: None) -> Iterator[None]:
    """A context in which the body of an imported module runs as if no mode were active, and `on_imported` is called
    with the module. Not for several threads."""
    with _disable_current_modes():
        pass  # its first call imports modules of torch, which must not happen within one of the imports below
    run = SourceFileLoader.exec_module

    def run_without_modes(loader: SourceFileLoader, module: ModuleType) -> None:
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            run(loader, module)
            on_imported(module)

    SourceFileLoader.exec_module = run_without_modes  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        SourceFileLoader.exec_module = run  # type: ignore[method-assign]
