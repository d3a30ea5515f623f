"""The bytes of the card's memory that an operation reads and writes: each tensor once, except for operations of which
more is known.

torch's schema says which arguments an operation writes. It does not say which arguments a kernel leaves unread, reads
only some rows of, or reads twice: those are listed here, as torch's CUDA kernels (aten/src/ATen/native/cuda) do it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

# The first argument is overwritten, or only its shape is looked at.
_NOT_READ = frozenset(
    {"copy_", "fill_", "zero_", "uniform_", "normal_", "random_", "exponential_", "log_normal_", "bernoulli_"}
    | {"_foreach_copy_", "_foreach_zero_"}
    | {"zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like", "new_zeros", "new_ones"}
    | {"new_full"}
)
# Arguments by their places that a kernel gets and leaves unread: the loss's gradient writes zeros and one value a row
# (nll_loss_backward_reduce_cuda_kernel_2d), and a pooling's goes by its indices (max_pool_backward_nchw).
_UNREAD = {"nll_loss_backward": (1,), "max_pool2d_with_indices_backward": (1,)}
# The first argument is a table, of which as many bytes are read as are written.
_LOOKUPS = frozenset({"embedding", "index_select", "gather", "nll_loss_forward"})
# The gradients of the weights are a kernel of their own, which reads gradient and input again
# (LayerNormBackwardKernelImplInternal, GroupNormBackwardKernelImplInternal).
_READ_TWICE = frozenset({"native_layer_norm_backward", "native_group_norm_backward", "_fused_rms_norm_backward"})


def traffic_bytes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """The bytes that one call of an aten operation moves. Works on tensors without data."""
    name = func._overloadpacket.__name__
    written = sum(map(touched_bytes, _tensors(out)))
    written += sum(touched_bytes(one) for place in _written_places(func) for one in _tensors(args[place : place + 1]))
    unread = (0,) if name in _NOT_READ or name in _LOOKUPS else _UNREAD.get(name, ())
    read = sum(touched_bytes(one) for place, arg in enumerate(args) if place not in unread for one in _tensors(arg))
    read += sum(map(touched_bytes, _tensors(kwargs)))
    if name in _LOOKUPS:
        read += min(written, sum(map(touched_bytes, _tensors(args[:1]))))
    if name in _READ_TWICE:
        read += sum(map(touched_bytes, _tensors(args[:2])))
    return read + written


def touched_bytes(tensor: torch.Tensor) -> int:
    """Bytes of distinct elements: an expanded dimension counts once."""
    if tensor.is_nested and tensor.layout is torch.strided:  # a nested tensor has no shape
        return int(tensor.numel() * tensor.itemsize)
    touched = tensor.itemsize
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if tensor.layout is torch.strided else ():
        touched *= int(size) if stride else 1
    return int(touched)


@cache
def _written_places(func: Any) -> tuple[int, ...]:
    """The arguments that an operation without a result writes. One that writes an argument and returns it has it in
    its results."""
    schema = func._schema
    if schema.returns:
        return ()
    return tuple(
        place for place, one in enumerate(schema.arguments) if one.alias_info is not None and one.alias_info.is_write
    )


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))
