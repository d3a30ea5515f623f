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
_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]
Found = Callable[[torch.Tensor, bool], bool]


class ReadsOutside(TorchFunctionMode):
    """Calls `found(tensor, is_written)` for every parameter that a function is given. It returns True for one that is
    read on the host, because no module runs. If a graph is made of such ones, `read_in_graph` brings them to the
    device, and the function is called there."""

    def __init__(self, found: Found, read_in_graph: Callable[[list[torch.Tensor]], None]) -> None:
        super().__init__()
        self._found = found
        self._read_in_graph = read_in_graph

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _FACTS:
            return func(*args, **kwargs)
        # What has .data may write to it, and nobody would see that.
        may_write = func == _DATA or _is_in_place(func)
        parameters = enumerate(_parameters_in((*args, *kwargs.values())))
        on_host = [one for number, one in parameters if self._found(one, may_write and not number)]
        if not on_host or may_write or not torch.is_grad_enabled():
            return func(*args, **kwargs)
        try:
            outcome = func(*args, **kwargs)
        except RuntimeError:  # the others are on the device
            self._read_in_graph(on_host)
            return func(*args, **kwargs)
        if not _is_in_graph(outcome):
            return outcome
        self._read_in_graph(on_host)
        return func(*args, **kwargs)


def _is_in_graph(outcome: object) -> bool:
    if isinstance(outcome, torch.Tensor):
        return outcome.grad_fn is not None
    return isinstance(outcome, (list, tuple)) and any(map(_is_in_graph, outcome))


def _is_in_place(func: Callable[..., Any]) -> bool:
    name = getattr(func, "__name__", "")
    return (name.endswith("_") and not name.endswith("__")) or name in ("__setitem__", "__set__")


def _parameters_in(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.nn.Parameter):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _parameters_in(value)
