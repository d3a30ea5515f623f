"""Spans for profilers: "vdnn::reload" and its like, beside torch's own operations in a trace.

Without a profiler a span costs one look at a flag.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from torch.autograd import profiler

_Result = TypeVar("_Result")

_NOTHING = contextlib.nullcontext()


def in_span(name: str, call: Callable[..., _Result], *arguments: Any, **options: Any) -> _Result:
    """One call as a span: for what is called so often that even an empty `with` would be felt."""
    if profiler._is_profiler_enabled:
        with profiler.record_function(f"vdnn::{name}"):
            return call(*arguments, **options)
    return call(*arguments, **options)


def span(name: str) -> AbstractContextManager[object]:
    """Around one phase of the runtime."""
    if profiler._is_profiler_enabled:
        return profiler.record_function(f"vdnn::{name}")
    return _NOTHING
