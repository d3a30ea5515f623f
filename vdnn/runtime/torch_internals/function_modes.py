"""Tells which torch function mode of this thread is the innermost, which alone can be left, and sets modes aside."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode,
    _get_current_function_mode_stack,
    _pop_mode,
    _push_mode,
)


def is_innermost(mode: TorchFunctionMode) -> bool:
    return _get_current_function_mode() is mode  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def without_modes(kind: type[TorchFunctionMode]) -> Iterator[None]:
    """Inside, no mode of `kind` sees what this thread calls, and no compiler sees the mode."""
    whole = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    others = [mode for mode in whole if not isinstance(mode, kind)]
    if len(others) == len(whole):
        yield
        return
    _replace(whole, others)
    try:
        yield
    finally:
        _replace(others, whole)


def _replace(modes: list[TorchFunctionMode], by: list[TorchFunctionMode]) -> None:
    for _ in modes:
        _pop_mode()  # type: ignore[no-untyped-call]
    for mode in by:
        _push_mode(mode)  # type: ignore[no-untyped-call]
