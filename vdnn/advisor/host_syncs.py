"""Where the host waits for the GPU inside a step: each call that needs a value or makes a tensor of unknown size.

Calls are seen twice over. Torch's operations come to the census, on any device. Python's own (`.cpu()`, `.tolist()`,
`print(tensor)`) run no operation on tensors that are on the CPU already, where a step is rehearsed or tried, so a
function mode sees them; what runs inside is then not counted again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from vdnn.advisor.source_place import asked_by_torchs, user_place

_aten = torch.ops.aten
VALUE = _aten._local_scalar_dense.default
SCALER = "GradScaler's look for infinities"
# Their outcome's size depends on data, or they return a Python value.
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
    """`count` of one step. `waited_ns` is what the host stood still there, on a GPU; 0 elsewhere."""

    place: str
    call: str
    count: int
    waited_ns: int = 0


def sync_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """What the operation would wait for if its tensors were on a GPU, or None."""
    if func is VALUE:
        if asked_by_torchs("optim"):
            return None  # torch's optimizers count their steps on the host
        return SCALER if asked_by_torchs("amp") else "a value read"
    if func in _SIZED_BY_DATA:
        return _SIZED_BY_DATA[func]
    if func in _INDEXED and any(isinstance(one, torch.Tensor) and _is_mask(one) for one in tree_leaves(args[1])):
        return "an index that is a mask"
    return "a copy to the host" if _is_copy_to_host(func, args, kwargs) else None


class PythonCalls(TorchFunctionMode):
    """While entered: names the call that an operation comes from, and counts those without an operation. `on_backward`
    is told of each loss whose backward pass begins."""

    def __init__(self, counted: Callable[[str, str], None], on_backward: Callable[[torch.Tensor], None]) -> None:
        super().__init__()
        self._counted, self._on_backward = counted, on_backward
        self.call: str | None = None  # the call that runs, for what the census sees in it
        self.is_aside = False  # what runs inside has been counted

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
    """From a GPU. Where the CPU stands for the card `.to(device)` may mean either, and nothing is said."""
    if func is not torch.Tensor.to or not args[0].is_cuda:
        return None
    for one in (*args[1:2], kwargs.get("device")):
        if isinstance(one, (str, torch.device)) and torch.device(one).type == "cpu":
            return '.to("cpu")'
    return None


def _is_mask(tensor: torch.Tensor) -> bool:
    return tensor.dtype in (torch.bool, torch.uint8)


def _is_copy_to_host(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """From a GPU. Of CPU tensors there is no telling what is meant to be on the card."""
    if func is _aten._to_copy.default:
        return args[0].is_cuda and torch.device(kwargs.get("device") or "cuda").type == "cpu"
    if func is _aten.copy_.default:
        waits = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        return bool(args[1].is_cuda and args[0].device.type == "cpu" and waits)
    return False
