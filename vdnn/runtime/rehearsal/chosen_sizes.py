"""Finds the mask that decides the size of an operation's result, and runs it as if that chose a given number."""

from __future__ import annotations

from typing import Any

import torch

_aten = torch.ops.aten


def chosen_by_mask(func: Any, args: tuple[Any, ...]) -> torch.Tensor | None:
    """The mask whose true elements decide the size of what the operation returns."""
    mask: torch.Tensor | None = None
    if func is _aten.nonzero.default:
        mask = args[0]
    elif func is _aten.masked_select.default:
        mask = args[1].expand(_common_shape(args))
    elif func is _aten.index.Tensor:
        masks = [one for one in args[1] if one is not None and one.dtype in (torch.bool, torch.uint8)]
        mask = masks[0] if masks else None
    return mask


def run_with_size(func: Any, args: tuple[Any, ...], size: int) -> Any:
    """Run the operation as if its mask chose `size` elements, on tensors without data."""
    if func is _aten.nonzero.default:
        return torch.empty(size, args[0].dim(), dtype=torch.int64)
    if func is _aten.masked_select.default:
        shape = _common_shape(args)
        return _aten.index.Tensor(args[0].expand(shape), _numbers(args[1].expand(shape), size))
    indices: list[torch.Tensor | None] = []
    for one in args[1]:
        is_mask = one is not None and one.dtype in (torch.bool, torch.uint8)
        indices += _numbers(one, size) if is_mask else [one]
    return func(args[0], indices)


def _common_shape(args: tuple[Any, ...]) -> torch.Size:
    return torch.broadcast_shapes(args[0].shape, args[1].shape)  # type: ignore[no-untyped-call, no-any-return]


def _numbers(mask: torch.Tensor, size: int) -> list[torch.Tensor]:
    return [torch.empty(size, dtype=torch.int64) for _ in range(mask.dim())]
