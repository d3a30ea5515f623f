"""Runs functions of ours in place of torch's that read or change the gradients of many parameters at one time.

torch wraps each function for clipping in one that turns gradients off and holds the wrapped function in a closure.
Replacing it in the closure works however a program imported the wrapper. GradScaler has a method. Both are replaced as
long as there is a user.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from types import CellType
from typing import Any, Protocol

import torch
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_
from torch.utils._foreach_utils import (
    _device_has_foreach_support,
    _group_tensors_by_device_and_dtype,
    _has_foreach_support,
)

from vdnn.runtime.torch_internals.cuda_graphs import keep_dynamo_out

Own = Callable[..., Any]
_WRAPPED = "func"  # the variable of torch's wrapper that holds the function
_UNSCALE = "_unscale_grads_"


class Passes(Protocol):
    """Functions in torch's place. Each gets torch's own as its first argument."""

    def clip_norm(self, own: Own, *args: Any, **kwargs: Any) -> torch.Tensor: ...
    def clip_with_norm(self, own: Own, *args: Any, **kwargs: Any) -> None: ...
    def clip_value(self, own: Own, *args: Any, **kwargs: Any) -> None: ...
    def unscale(
        self, own: Own, scaler: Any, optimizer: Any, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]: ...


_lock = threading.Lock()
_users = 0


def _cell_of(wrapper: Any) -> CellType:
    cell: CellType = wrapper.__closure__[wrapper.__code__.co_freevars.index(_WRAPPED)]
    return cell


def replace_passes(passes: Passes) -> Callable[[], None]:
    """From now on torch's functions call those of `passes`, the same for all users. Returns a function that undoes this
    once."""
    global _users
    with _lock:
        if not _users:
            for wrapper, ours in (
                (clip_grad_norm_, passes.clip_norm),
                (clip_grads_with_norm_, passes.clip_with_norm),
                (clip_grad_value_, passes.clip_value),
            ):
                cell = _cell_of(wrapper)
                cell.cell_contents = _in_place_of(cell.cell_contents, ours)
            own_unscale = getattr(torch.amp.GradScaler, _UNSCALE)
            setattr(torch.amp.GradScaler, _UNSCALE, _in_place_of(own_unscale, passes.unscale))
        _users += 1
    return functools.cache(_leave)


def _leave() -> None:
    global _users
    with _lock:
        _users -= 1
        if not _users:
            for wrapper in (clip_grad_norm_, clip_grads_with_norm_, clip_grad_value_):
                cell = _cell_of(wrapper)
                cell.cell_contents = cell.cell_contents.__wrapped__
            setattr(torch.amp.GradScaler, _UNSCALE, getattr(torch.amp.GradScaler, _UNSCALE).__wrapped__)


def _in_place_of(own: Own, ours: Callable[..., Any]) -> Own:
    @functools.wraps(own)
    def function(*args: Any, **kwargs: Any) -> Any:
        return ours(own, *args, **kwargs)

    keep_dynamo_out(function)
    return function


# What torch's functions do inside.


def grouped(likes: list[torch.Tensor]) -> Iterator[tuple[torch.device, list[int]]]:
    """The device and the positions of each group of one device and dtype, in torch's order. `likes`: small tensors of
    the devices and dtypes."""
    groups: dict[Any, Any] = _group_tensors_by_device_and_dtype([likes], with_indices=True)  # type: ignore[list-item]
    for (device, _), (_, positions) in groups.items():
        yield device, positions


def takes_foreach(likes: list[torch.Tensor], device: torch.device, foreach: bool | None) -> bool:
    """True if torch uses its foreach functions for a group. Raises as torch does if `foreach=True` is given and
    impossible."""
    if foreach is None:
        return _has_foreach_support(likes, device)
    if foreach and not _device_has_foreach_support(device):
        raise RuntimeError(f"foreach=True was passed, but can't use the foreach API on {device.type} tensors")
    return foreach


def norms_of(gradients: Iterable[torch.Tensor], order: float, *, foreach: bool) -> list[torch.Tensor]:
    if foreach:
        return list(torch._foreach_norm(list(gradients), order))
    return [torch.linalg.vector_norm(gradient, order) for gradient in gradients]
