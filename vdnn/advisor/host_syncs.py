"""Host syncs inside a step: each call that needs a value from the GPU, or makes a tensor whose size depends on data.

Two modes see these calls. The census sees torch's operations, on any device. Calls from Python such as `.cpu()`,
`.tolist()` and `print(tensor)` run no operation on tensors that are already on the CPU, as they are in a rehearsal.
A function mode sees those, and the operations inside them are not counted again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from vdnn.runtime.rehearsal.source_place import called_from_torch, user_place

_aten = torch.ops.aten
VALUE = _aten._local_scalar_dense.default
SCALER = "GradScaler's look for infinities"
# The size of the result depends on data, or the operation returns a Python value.
_SIZED_BY_DATA = {
    _aten.nonzero.default: "nonzero()",
    _aten.masked_select.default: "masked_select()",
    _aten._unique2.default: "unique()",
    _aten.unique_dim.default: "unique()",
    _aten.unique_consecutive.default: "unique_consecutive()",
    _aten.repeat_interleave.Tensor: "repeat_interleave()",
    _aten.bincount.default: "bincount()",
    _aten.equal.default: "equal()",
}
_INDEXED = {_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default}
_OF_PYTHON: dict[Callable[..., Any], str] = {
    torch.Tensor.item: ".item()",
    torch.Tensor.__bool__: "bool(tensor)",
    torch.Tensor.__int__: "int(tensor)",
    torch.Tensor.__float__: "float(tensor)",
    torch.Tensor.__index__: "a tensor as an index",
}
_TO_HOST: dict[Callable[..., Any], str] = {
    torch.Tensor.cpu: ".cpu()",
    torch.Tensor.numpy: ".numpy()",
    torch.Tensor.tolist: ".tolist()",
    torch.Tensor.__array__: "numpy of a tensor",
    torch.Tensor.__repr__: "printing a tensor",
    torch.Tensor.__format__: "formatting a tensor",
}


@dataclass(frozen=True, slots=True)
class HostSync:
    """One line of the program that syncs. `count` is per step. `waited_ns` is how long the host waited there, measured
    on a GPU; 0 elsewhere."""

    place: str
    call: str
    count: int
    waited_ns: int = 0


def sync_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """The name of the host sync that the operation would cause if its tensors were on a GPU, or None."""
    if func is VALUE:
        if called_from_torch("optim"):
            return None  # torch's optimizers count their steps on the host
        return SCALER if called_from_torch("amp") else "a value read"
    if func in _SIZED_BY_DATA:
        return _SIZED_BY_DATA[func]
    if func in _INDEXED and any(isinstance(one, torch.Tensor) and _is_mask(one) for one in tree_leaves(args[1])):
        return "an index that is a mask"
    return "a copy to the host" if _is_copy_to_host(func, args, kwargs) else None


class PythonCalls(TorchFunctionMode):
    """A function mode that names the Python call behind an operation, and counts calls that run no operation.
    `on_backward` is called with each loss whose backward pass begins."""

    def __init__(self, counted: Callable[[str, str], None], on_backward: Callable[[torch.Tensor], None]) -> None:
        super().__init__()
        self._counted, self._on_backward = counted, on_backward
        self.call: str | None = None  # the current call, which names the operations that the census sees in it
        self.is_aside = False  # the current call has been counted, so the operations inside it are not

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.backward:
            self._on_backward(args[0])
        named = _TO_HOST.get(func) or _to_of(func, args, kwargs)
        if named is not None and not self.is_aside:
            self._counted(user_place(), named)
            self.is_aside = True
            try:
                return func(*args, **kwargs)
            finally:
                self.is_aside = False
        if func in _OF_PYTHON:
            self.call, before = _OF_PYTHON[func], self.call
            try:
                return func(*args, **kwargs)
            finally:
                self.call = before
        return func(*args, **kwargs)


def _to_of(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Names a `.to` from a GPU to the CPU. If CPU tensors stand for the card, the direction is unknown: None."""
    if func is not torch.Tensor.to or not args[0].is_cuda:
        return None
    for one in (*args[1:2], kwargs.get("device")):
        if isinstance(one, (str, torch.device)) and torch.device(one).type == "cpu":
            return '.to("cpu")'
    return None


def _is_mask(tensor: torch.Tensor) -> bool:
    return tensor.dtype in (torch.bool, torch.uint8)


def _is_copy_to_host(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True for a copy from a GPU. For CPU tensors it is unknown which of them stand for the card."""
    if func is _aten._to_copy.default:
        return args[0].is_cuda and torch.device(kwargs.get("device") or "cuda").type == "cpu"
    if func is _aten.copy_.default:
        waits = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        return bool(args[1].is_cuda and args[0].device.type == "cpu" and waits)
    return False
