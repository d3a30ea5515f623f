"""Hears that autograd has accumulated a gradient, ahead of all other hooks or behind them.

torch calls the post-accumulate-grad hooks of a tensor in the order in which they were put into the tensor's dict. It
reads that dict natively, so it does not see `OrderedDict.move_to_end`: a hook is first only if the others are put in
again behind it. Their handles stay valid, since they find their hooks by number. A call runs the hooks that were there
when it began.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

Hook = Callable[[torch.Tensor], None]
_ours: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # handles of our hooks, by number
_LISTS = {  # where a tensor has its hooks, and how one is registered there
    "_post_accumulate_grad_hooks": torch.Tensor.register_post_accumulate_grad_hook,
    "_backward_hooks": torch.Tensor.register_hook,
}


def hear_first(parameter: torch.Tensor, hook: Hook) -> Any:
    """`hook` is called ahead of all hooks that `parameter` has now. Returns the handle that removes it."""
    handle = _registered(parameter, hook, "_post_accumulate_grad_hooks")
    hooks = _hooks_of(parameter)
    others = {number: other for number, other in dict.items(hooks) if number != handle.id}
    if others:
        hooks.clear()
        hooks[handle.id] = hook
        hooks.update(others)
    return handle


def hear_behind(parameter: torch.Tensor, hook: Hook) -> Any:
    """`hook` is called behind all hooks that `parameter` has now."""
    return _registered(parameter, hook, "_post_accumulate_grad_hooks")


def hear_incoming(parameter: torch.Tensor, hook: Callable[[torch.Tensor | None], None]) -> Any:
    """`hook` is called with a gradient before it is accumulated, or with None where a backward gives none."""
    return _registered(parameter, hook, "_backward_hooks")


def _registered(parameter: torch.Tensor, hook: Any, where: str) -> Any:
    register: Any = _LISTS[where]
    handle = register(parameter, hook)
    _ours[handle.id] = handle
    return handle


def is_heard_last(parameter: torch.Tensor, handle: Any) -> bool:
    """True if the hook of `handle` is behind all others."""
    return next(dict.__reversed__(_hooks_of(parameter)), None) == handle.id  # type: ignore[no-any-return]


def hear_last(parameter: torch.Tensor, handle: Any) -> None:
    """Puts the hook of `handle` behind all others, from the next call on."""
    hooks = _hooks_of(parameter)
    hooks[handle.id] = hooks.pop(handle.id)


def has_hooks_of_others(parameter: torch.Tensor) -> bool:
    """True if the program has hooks on the gradient of `parameter`."""
    return any(number not in _ours for where in _LISTS for number in getattr(parameter, where) or ())


def _hooks_of(parameter: torch.Tensor) -> Any:
    return parameter._post_accumulate_grad_hooks


# The node at which the gradients of a parameter are accumulated.

_OF_SEVERAL = "register_multi_grad_hook.<locals>.get_inner_hook.<locals>."


def is_node_watched(parameter: torch.Tensor) -> bool:
    """True if the program has hooks on the node at which the gradients of `parameter` are accumulated, or asks autograd
    whether that node runs, as `register_multi_grad_hook` does to know which gradient is the last."""
    if not parameter.requires_grad:
        return False
    hooks = (parameter._backward_hooks or {}).values()
    if any(getattr(one, "__qualname__", "").startswith(_OF_SEVERAL) for one in hooks):
        return True
    node: Any = torch.autograd.graph.get_gradient_edge(parameter).node
    return any(map(_has_hooks, (node.register_hook, node.register_prehook)))


def _has_hooks(register: Callable[..., Any]) -> bool:
    """The handle of a hook knows the dict that has all hooks of its node."""
    handle = register(lambda *_: None)
    known = handle.hooks_dict_ref()
    handle.remove()
    return bool(known)


# Swaps of parameters.

Taken = list[tuple[str, Any, Hook]]


def without_ours(parameter: torch.Tensor) -> Taken:
    """Takes our hooks out of `parameter`, whose implementation is about to be swapped: torch leaves the dicts of hooks
    where they are, but calls those of the implementation."""
    taken: Taken = []
    for where in _LISTS:
        hooks = getattr(parameter, where)
        for number in list(hooks or ()):
            handle = _ours.get(number)
            if handle is not None and handle.hooks_dict_ref() is hooks:
                taken.append((where, handle, hooks.pop(number)))
        if hooks is not None and not hooks:
            setattr(parameter, where, None)
    return taken


def with_ours(parameter: torch.Tensor, taken: Taken) -> None:
    """Puts them in again, so that torch calls them. Their handles stay valid."""
    is_frozen = bool(taken) and not parameter.requires_grad
    if is_frozen:  # since it got its hooks: torch takes hooks only while it requires a gradient
        parameter.requires_grad_(True)
    for where in {where for where, _, _ in taken}:
        setattr(parameter, where, OrderedDict())
    for where, handle, hook in taken:
        made = _registered(parameter, hook, where)
        handle.id, handle.hooks_dict_ref = made.id, made.hooks_dict_ref
        _ours[handle.id] = handle
    if is_frozen:
        parameter.requires_grad_(False)
