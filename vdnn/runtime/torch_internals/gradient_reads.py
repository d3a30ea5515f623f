"""Routes reads and writes of `parameter.grad` through a function of vdnn, as long as there is a user of it.

torch keeps a gradient in a native field that Python reads through an attribute of its base class. An attribute `grad`
of torch.nn.Parameter, or of DTensor, shadows that one, so reads of optimizers, clipping, GradScaler and users arrive
here. Autograd reads and writes the native field.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch

from vdnn.runtime.torch_internals.cuda_graphs import keep_dynamo_out
from vdnn.runtime.torch_internals.data_reads import native_data, set_native_data
from vdnn.runtime.torch_internals.tensor_kinds import outside_of_inference_mode

_native: Any = torch._C.TensorBase.grad


class Holder(Protocol):
    """Keeps gradients away from their parameters."""

    def before_read(self, parameter: torch.Tensor) -> None:
        """Puts the gradient into the native field."""

    def write(self, parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
        """Puts `gradient` into the native field, and forgets the one that was there."""

    def peek(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """The gradient, on the device or the host. For its metadata only: shape, dtype, layout."""


_lock = threading.Lock()
_holders: dict[int, Holder] = {}  # by id of the parameter, which its holder keeps alive
_outer: dict[int, list[Holder]] = {}  # that hear nothing while the one in `_holders` does, the outermost first
_classes: set[Any] = set()  # that have an attribute of ours


def native_gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    gradient: torch.Tensor | None = _native.__get__(parameter)
    return gradient


def set_native_gradient(
    parameter: torch.Tensor, gradient: torch.Tensor | None, device: torch.device | None = None
) -> None:
    """`device` is where the gradient belongs, if the data of the parameter may be on the host meanwhile. Torch refuses
    two devices: for as long as it looks, the data are one element on `device`."""
    is_elsewhere = device is not None and device != parameter.device
    if not is_elsewhere or not isinstance(gradient, torch.Tensor) or gradient.device != device:
        _native.__set__(parameter, gradient)
        return
    with outside_of_inference_mode(), torch.no_grad(), torch._C.DisableTorchFunction():
        data = native_data(parameter)
        one = torch.empty((), dtype=data.dtype, device=device)
        set_native_data(parameter, one.expand(parameter.size()))
        try:
            _native.__set__(parameter, gradient)
        finally:
            set_native_data(parameter, data)


def put_gradient_on(parameter: torch.Tensor, device: torch.device) -> None:
    """Moves the gradient in the native field to `device`: torch copies one that is expanded, such as that of a sum, to
    where the data of the parameter are."""
    gradient = native_gradient(parameter)
    if gradient is not None and gradient.device != device:
        set_native_gradient(parameter, gradient.to(device), device)


def _get(parameter: torch.Tensor) -> torch.Tensor | None:
    holder = _holders.get(id(parameter))
    if holder is not None:
        holder.before_read(parameter)
    return native_gradient(parameter)


def _set(parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
    holder = _holders.get(id(parameter))
    if holder is None:
        _native.__set__(parameter, gradient)
    else:
        holder.write(parameter, gradient)


def _delete(parameter: torch.Tensor) -> None:
    _set(parameter, None)


for access in (_get, _set, _delete):
    keep_dynamo_out(access)


def watch_gradient(parameter: torch.Tensor, holder: Holder) -> Callable[[], None]:
    """Calls `holder` at each read and write of `parameter.grad` from now on. Returns the function that undoes this.

    An earlier holder, such as that of an outer session, first puts the gradient into the native field. It is called
    again once `holder` is undone."""
    key = id(parameter)
    before = _holders.get(key)
    if before is not None:
        before.before_read(parameter)
    with _lock:
        kind: Any = type(parameter)
        if kind not in _classes:
            kind.grad = property(_get, _set, _delete)
            _classes.add(kind)
        if before is not None:
            _outer.setdefault(key, []).append(before)
        _holders[key] = holder

    def undo() -> None:
        with _lock:
            outer = _outer.get(key, [])
            if _holders.get(key) is not holder:
                outer[:] = [one for one in outer if one is not holder]
            elif outer:
                _holders[key] = outer.pop()
            else:
                del _holders[key]
            if not outer:
                _outer.pop(key, None)
            if not _holders:
                while _classes:
                    del _classes.pop().grad

    return undo


def holder_of(parameter: torch.Tensor) -> Holder | None:
    return _holders.get(id(parameter))
