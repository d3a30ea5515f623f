"""Profiler spans of the runtime, such as "vdnn::reload", which a trace shows beside torch's own operations.

Without a profiler a span costs one test of a flag.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import ParamSpec, TypeVar

from torch.autograd import profiler

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

_NOTHING = contextlib.nullcontext()


def in_span(name: str, call: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """`call`, inside a span if a profiler runs. For calls so frequent that even an empty `with` would cost too much."""
    return functools.partial(_in_span, name, call) if profiler._is_profiler_enabled else call


def _in_span(
    name: str, call: Callable[_Arguments, _Result], *arguments: _Arguments.args, **options: _Arguments.kwargs
) -> _Result:
    with profiler.record_function(f"vdnn::{name}"):
        return call(*arguments, **options)


def span(name: str) -> AbstractContextManager[object]:
    """A context manager around one phase of the runtime."""
    if profiler._is_profiler_enabled:
        return profiler.record_function(f"vdnn::{name}")
    return _NOTHING
