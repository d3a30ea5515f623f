"""The entry of a dispatch mode, where torch turns its compiler off.

Torch wraps the handler of each dispatch mode so that dynamo does not compile its frames, in two calls and four changes
of state for every operation. They change nothing where no callback of dynamo is set, which is all of an eager step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

# An older torch cannot tell: then its wrapper is always called.
_callback: Callable[[], Any] = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", lambda: False)


_Handler = Callable[..., Any]


def turns_dynamo_off(handler: _Handler) -> _Handler:
    """Decorates the `__torch_dispatch__` of a mode whose `_should_skip_dynamo()` is False."""
    wrapped: Any = torch._disable_dynamo(handler, recursive=True)  # type: ignore[attr-defined]

    @functools.wraps(handler)
    def enter(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _callback() is None:
            return handler(mode, func, types, args, kwargs)
        return wrapped(mode, func, types, args, kwargs)

    return enter
