"""The entry of a dispatch mode on tensors without data: it answers for their devices, and turns torch's compiler off.

Autograd's engine and many operations ask each tensor for its device, which is two thirds of all calls of a mode. A
tensor without data knows it, and the modes below would only pass the question on.

Torch wraps the handler of each dispatch mode so that dynamo does not compile its frames, in two calls and four changes
of state for every operation. They change nothing where no callback of dynamo is set, which is all of an eager step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import CodeType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

_DEVICE_OF = torch.ops.prim.device.default
_Handler = Callable[..., Any]
_dynamo: Any = torch._C._dynamo.eval_frame


def _skip(code: CodeType) -> None:
    """Keeps dynamo from compiling frames of this code, but not the frames that they call."""
    action = _dynamo._FrameAction
    _dynamo.set_code_exec_strategy(code, _dynamo._FrameExecStrategy(action.SKIP, action.DEFAULT))


_NEEDED = ("get_eval_frame_callback", "set_code_exec_strategy", "_FrameAction", "_FrameExecStrategy")
_can_tell = all(hasattr(_dynamo, name) for name in _NEEDED)  # an older torch cannot
_callback: Callable[[], Any] = _dynamo.get_eval_frame_callback if _can_tell else lambda: False


def turns_dynamo_off(handler: _Handler) -> _Handler:
    """Decorates the `__torch_dispatch__` of a mode whose `_should_skip_dynamo()` is False. The mode is not asked for
    devices of tensors without data, unless torch is too old to tell whether its compiler is on."""
    wrapped: Any = torch._disable_dynamo(handler, recursive=True)  # type: ignore[attr-defined]
    if not _can_tell:
        return wrapped  # type: ignore[no-any-return]

    @functools.wraps(handler)
    def enter(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE_OF and type(args[0]) is FakeTensor:
            return args[0].fake_device
        if _callback() is None:
            return handler(mode, func, types, args, kwargs)
        return wrapped(mode, func, types, args, kwargs)

    _skip(enter.__code__)  # type: ignore[attr-defined]
    return enter
