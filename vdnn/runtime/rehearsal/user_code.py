"""Turns what the user's code raises in a rehearsal or an observed step into one message: what was being done, the line,
what to do."""

from __future__ import annotations

import contextlib
import inspect
import linecache
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, final

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

from vdnn.errors import RehearsalError, VdnnError

_NOT_THE_USERS = (str(Path(torch.__file__).parent) + "/", str(Path(__file__).parents[2]) + "/", "<")
_PASS_THROUGH = (VdnnError, torch.OutOfMemoryError)
_LIBRARY = sysconfig.get_paths()["stdlib"]
_TRY_IT = "Run the step once with tensors that have data: if it fails there too, the program is at fault"
_FAILS_ANYWHERE = "This was called as the program itself would call it: it fails without vdnn too"
_NO_CARD = (
    "A rehearsal has no GPU: tensors and modules may be moved to one, but its libraries and custom kernels cannot be "
    "called. Leave that call out of what is rehearsed"
)


def user_code(
    doing: str, *, function: Callable[..., Any] | None = None, has_data: bool = False
) -> contextlib.AbstractContextManager[None]:
    """A context in which the user's code runs. Errors of vdnn pass through, as does a lack of memory; others become a
    RehearsalError with the original as its cause. `has_data`: this is no rehearsal."""
    return _UserCode(doing, function, has_data)


@final
class _UserCode(contextlib.AbstractContextManager[None]):
    """Not a generator: contextlib takes a RuntimeError that was caused by the user's StopIteration for its own."""

    def __init__(self, doing: str, function: Callable[..., Any] | None, has_data: bool) -> None:
        self._doing, self._function, self._has_data = doing, function, has_data

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, (Exception, SystemExit)) or isinstance(error, _PASS_THROUGH):
            return
        place = _place(error)
        is_call = inspect.isfunction(self._function) and not place
        advice = _FAILS_ANYWHERE if self._has_data else _advice(error, is_call=is_call)
        raise RehearsalError(doing=self._doing, problem=_problem(error), place=place, advice=advice) from error


def _problem(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _place(error: BaseException) -> str:
    """The innermost line outside torch and vdnn."""
    frames = list(traceback.walk_tb(error.__traceback__))
    for frame, line in reversed(frames):
        name = frame.f_code.co_filename
        if not name.startswith(_NOT_THE_USERS) and (not name.startswith(_LIBRARY) or "/site-packages/" in name):
            text = linecache.getline(name, line).strip()
            return f"{name}:{line}, in {frame.f_code.co_name}: {text}"
    return ""


def _advice(error: BaseException, *, is_call: bool) -> str:
    text = str(error)
    if is_call and isinstance(error, TypeError):
        return (
            "The function is called with one number, the batch size. A program that trains by itself cannot be taken "
            "apart: write a function that returns its model and inputs, or an object with `model` and `step()`"
        )
    if isinstance(error, (DataDependentOutputException, DynamicOutputShapeException)):
        return (
            "The result of this operation depends on data, and a rehearsal has none. Take it out of the step that is "
            "rehearsed, or bring its result as an input"
        )
    if isinstance(error, (UnsupportedOperatorException, NotImplementedError)):
        return (
            "This operation cannot run without data. If it is a custom one, register its shape with "
            "torch.library.register_fake"
        )
    if "CUDA" in text or "cuda" in text or "NVIDIA" in text:
        return _NO_CARD
    if isinstance(error, ImportError):
        return "Install what is missing, or run the command in the environment of the program"
    if isinstance(error, OSError):
        return "A rehearsal needs no weights: make the model from its configuration"
    if "UninitializedParameter" in text:
        return "A rehearsal cannot make the parameters of a lazy module: give the module its sizes"
    if "second time" in text:
        return "step() keeps a graph of an earlier step: detach what it carries over"
    return _TRY_IT
