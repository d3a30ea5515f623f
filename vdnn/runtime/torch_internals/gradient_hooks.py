"""Hears that autograd has accumulated a gradient, ahead of all other hooks or behind them.

torch calls the post-accumulate-grad hooks of a tensor in the order in which they were put into the tensor's dict. It
reads that dict natively, so it does not see `OrderedDict.move_to_end`: a hook is first only if the others are put in
again behind it. Their handles stay valid, since they find their hooks by number. A call runs the hooks that were there
when it began.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Hook = Callable[[torch.Tensor], None]


def hear_first(parameter: torch.Tensor, hook: Hook) -> Any:
    """`hook` is called ahead of all hooks that `parameter` has now. Returns the handle that removes it."""
    handle: Any = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    hooks = _hooks_of(parameter)
    others = {number: other for number, other in dict.items(hooks) if number != handle.id}
    if others:
        hooks.clear()
        hooks[handle.id] = hook
        hooks.update(others)
    return handle


def is_heard_last(parameter: torch.Tensor, handle: Any) -> bool:
    """True if the hook of `handle` is behind all others."""
    return next(dict.__reversed__(_hooks_of(parameter)), None) == handle.id  # type: ignore[no-any-return]


def hear_last(parameter: torch.Tensor, handle: Any) -> None:
    """Puts the hook of `handle` behind all others, from the next call on."""
    hooks = _hooks_of(parameter)
    hooks[handle.id] = hooks.pop(handle.id)


def _hooks_of(parameter: torch.Tensor) -> Any:
    return parameter._post_accumulate_grad_hooks
