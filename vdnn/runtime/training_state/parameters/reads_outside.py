"""Finds parameters that are read outside of their module, such as a tied head, in the first calls of a model.

A function mode sees every function that the program calls with a tensor. Inside of a model's call, what reads a
parameter that is away brings it to the device, and the module that runs is its reader from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

# Functions that tell facts of a tensor without its bytes. Hooks of modules call them for every parameter.
_FACTS = frozenset(
    getattr(torch.Tensor, name).__get__
    for name in (
        *("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "grad", "grad_fn", "_version"),
        *("is_quantized", "is_nested", "is_meta", "is_cuda", "is_sparse", "_base"),
    )
) | frozenset(
    getattr(torch.Tensor, name)
    for name in (
        *("size", "dim", "stride", "numel", "element_size", "untyped_storage", "storage_offset", "is_contiguous"),
        *("is_floating_point", "is_complex", "data_ptr", "_is_zerotensor", "get_device", "__hash__", "requires_grad_"),
    )
)
# Functions that make no graph of the tensor that they are given.
_WITHOUT_GRAPH = frozenset(
    getattr(torch.Tensor, name)
    for name in (
        *("detach", "register_hook", "register_post_accumulate_grad_hook", "retain_grad", "__deepcopy__", "tolist"),
        *("__reduce_ex__", "__repr__", "__format__", "is_shared", "share_memory_", "item", "__len__"),
    )
)
_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]
Found = Callable[[torch.Tensor, bool, bool], None]


class ReadsOutside(TorchFunctionMode):
    """Calls `found(tensor, is_written, is_in_graph)` for every parameter that a function is given."""

    def __init__(self, found: Found) -> None:
        super().__init__()
        self._found = found

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _FACTS:
            # What has .data may write to it, and nobody would see that.
            may_write = func == _DATA or _is_in_place(func)
            is_in_graph = torch.is_grad_enabled() and not may_write and func not in _WITHOUT_GRAPH
            for number, tensor in enumerate(_parameters_in((*args, *kwargs.values()))):
                self._found(tensor, may_write and not number, is_in_graph)
        return func(*args, **kwargs)


def _is_in_place(func: Callable[..., Any]) -> bool:
    name = getattr(func, "__name__", "")
    return (name.endswith("_") and not name.endswith("__")) or name in ("__setitem__", "__set__")


def _parameters_in(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.nn.Parameter):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _parameters_in(value)
