"""Lets grouped products of all dtypes that torch multiplies run on tensors without data.

Torch's rule for their geometry asks for bfloat16. Its kernels, on the CPU and on CUDA, take float32 and float16 too: by
one product for each group ("Expected mat_a to be Float32, BFloat16 or Float16 matrix", aten/src/ATen/native/
GroupedMMUtils.h). Mixtures of experts of transformers call it in the dtype of their weights. Since torch 2.15 the rule
lets two dtypes pass, which the kernels refuse.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import _meta_registrations

_rules: Any = _meta_registrations
_RULE, _RESULT = "_meta_grouped_mm_common", "_create_grouped_mm_output_tensor"
_BY_GROUP = (torch.float32, torch.float16)


@contextlib.contextmanager
def grouped_products_of_all_dtypes() -> Iterator[None]:
    """A context in which the rule takes the dtypes of the kernels. Not for several threads."""
    rule, result_of = getattr(_rules, _RULE, None), getattr(_rules, _RESULT, None)
    if rule is None or result_of is None:  # of another torch
        yield
        return

    def of_all_dtypes(left: torch.Tensor, right: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        is_scaled = (args and args[0] is not None) or options.get("scale_a") is not None
        if not is_scaled and right.dtype is not left.dtype:
            raise RuntimeError(f"Expected mat_a and mat_b to have the same dtype, got {left.dtype} and {right.dtype}")
        if is_scaled or left.dtype not in _BY_GROUP:
            return rule(left, right, *args, **options)  # type: ignore[no-any-return]
        return result_of(left, right, options.get("offs"), options.get("out_dtype"))  # type: ignore[no-any-return]

    setattr(_rules, _RULE, of_all_dtypes)
    try:
        yield
    finally:
        setattr(_rules, _RULE, rule)
