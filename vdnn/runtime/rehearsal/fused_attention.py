"""Chooses the fused attention that a GPU would run, and calls it on the CPU tensors of a rehearsal.

Torch's operations for CUDA have rules for their shapes and derivatives that do not ask for a device, so they save here
what they save there. The choice follows torch's own (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp):

  flash       float16 and bfloat16 without a mask, from Ampere on. Heads are padded to a multiple of 8.
  efficient   float32, masks, and float16 on older cards. A mask of booleans becomes one of numbers, with padded rows.
  math        all else. It saves the whole matrix.

cuDNN's attention, which torch prefers on Hopper, saves as many bytes as flash attention, and a mask without padding.
A kernel that the program has switched off, as by torch.nn.attention.sdpa_kernel, is not chosen.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map_only

from vdnn.runtime.rehearsal.cuda_autocast import is_cast

_aten = torch.ops.aten
_HALVES = (torch.float16, torch.bfloat16)
_MOST_FLASH = 256
_FLASH_ALIGNMENT = 8
_MASK_ALIGNMENT = 8


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    is_ampere: bool = True,
) -> Any:
    """scaled_dot_product_attention as a GPU runs it; `is_ampere` or newer. With data it runs on the CPU, without
    dropout."""
    options: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value, attn_mask = tree_map_only(
            torch.Tensor, lambda one: one.to(dtype) if is_cast(one) else one, (query, key, value, attn_mask)
        )
    parts = (query, key, value)
    if (
        not all(isinstance(one, FakeTensor) and one.dim() == 4 for one in parts)
        or len({one.dtype for one in parts}) > 1
    ):
        return functional.scaled_dot_product_attention(query, key, value, attn_mask, **options)
    if attn_mask is None and _fits_flash(query, key, value, is_causal, is_ampere):
        return _flash(query, key, value, dropout_p, is_causal, scale)
    if _fits_efficient(query, key, value, enable_gqa, is_ampere):
        mask = None if attn_mask is None else _as_bias(attn_mask, query, key)
        has_gradients = torch.is_grad_enabled() and any(one.requires_grad for one in parts)
        out = _aten._scaled_dot_product_efficient_attention(
            query, key, value, mask, has_gradients, dropout_p, is_causal, scale=scale
        )
        return out[0]
    with sdpa_kernel(SDPBackend.MATH):
        return functional.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, **options)


def _fits_flash(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool, is_ampere: bool) -> bool:
    backends: Any = torch.backends.cuda
    if not backends.flash_sdp_enabled() and not backends.cudnn_sdp_enabled():
        return False
    if not is_ampere or query.dtype not in _HALVES or (is_causal and query.shape[2] != key.shape[2]):
        return False
    return query.shape[3] == key.shape[3] == value.shape[3] <= _MOST_FLASH and _are_dense(query, key, value)


def _fits_efficient(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool, is_ampere: bool
) -> bool:
    is_half = query.dtype in _HALVES
    backends: Any = torch.backends.cuda
    if not backends.mem_efficient_sdp_enabled():
        return False
    if query.dtype is not torch.float32 and not is_half:
        return False
    if enable_gqa or (query.dtype is torch.bfloat16 and not is_ampere):
        return False
    alignment = 8 if is_half else 4 if is_ampere else 1
    is_aligned = query.shape[3] % alignment == 0 and value.shape[3] % alignment == 0
    return is_aligned and query.shape[:2] == key.shape[:2] == value.shape[:2] and _are_dense(query, key, value)


def _are_dense(*tensors: torch.Tensor) -> bool:
    return all(one.numel() and (one.stride(3) == 1 or one.shape[3] == 1) for one in tensors)


def _flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> Any:
    size = query.shape[3]
    missing = -size % _FLASH_ALIGNMENT
    if missing:
        query, key, value = (functional.pad(one, (0, missing)) for one in (query, key, value))
    scale = 1 / math.sqrt(size) if scale is None else scale
    out = _aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
    return out[..., :size] if missing else out


def _as_bias(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """The mask as numbers that are added, with rows that begin at aligned addresses, for each head."""
    if mask.dtype is torch.bool:
        mask = torch.where(mask, 0.0, torch.full((), -math.inf, dtype=query.dtype))
    if mask.stride(-1) != 1 or any(stride % _MASK_ALIGNMENT for stride in mask.stride()[:-1]):
        length = mask.shape[-1]
        mask = functional.pad(mask, (0, _MASK_ALIGNMENT - length % _MASK_ALIGNMENT))[..., :length]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
