"""Tells which torch function mode of this thread is the innermost: only that one can be left."""

from __future__ import annotations

from torch.overrides import TorchFunctionMode, _get_current_function_mode


def is_innermost(mode: TorchFunctionMode) -> bool:
    return _get_current_function_mode() is mode  # type: ignore[no-untyped-call]
