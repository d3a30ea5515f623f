"""Raises what a real run raises where an operation refuses the dtypes of its arguments.

Torch computes the results of tensors without data from shapes, and some of these rules do not look at dtypes: a product
of float32 and bfloat16 passes. Here such an operation first runs for real on tensors of one element with the same
dtypes, once for each combination of them, so that the error is torch's own.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

_aten = torch.ops.aten
_PRODUCTS = "mm mv addmm addmv bmm baddbmm addbmm dot vdot linear _cdist_forward"
_INDEXED = "index_select index_add index_copy index_put gather scatter scatter_add embedding"
_LOSSES = "nll_loss_forward nll_loss2d_forward binary_cross_entropy"
_POINTWISE = "gelu silu glu _softmax _log_softmax"
# Their whole numbers are sizes, and of one element here. The whole numbers of the others are dimensions and the like.
_NORMS = "native_layer_norm native_group_norm native_batch_norm"
_CHECKED = frozenset(" ".join((_PRODUCTS, _INDEXED, _LOSSES, _POINTWISE, _NORMS)).split())
_WITH_SIZES = frozenset(_NORMS.split())
# Other errors come from the small sizes, or from kernels that only the CPU lacks.
_ABOUT_DTYPES = re.compile(
    r"dtype|scalar type|dtypes match|not implemented for '(?:Long|Int|Short|Char|Byte|Bool)'", re.IGNORECASE
)


class DtypeChecks:
    """Remembers the combinations of dtypes that torch accepts."""

    def __init__(self) -> None:
        self._accepted: set[object] = set()

    def require_accepted(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Any]) -> None:
        """Raises the error of a real run if `func` refuses the dtypes. `leaves` are those of all arguments."""
        name = func._schema.name.removeprefix("aten::").removesuffix("_")
        if name not in _CHECKED:
            return
        key = func, tuple((one.dtype, one.dim()) for one in leaves if isinstance(one, torch.Tensor))
        if key in self._accepted:
            return
        with _disable_current_modes(), no_dispatch():
            small, named = tree_map(lambda one: _of_one_element(one, name in _WITH_SIZES), (args, kwargs))
            try:
                func(*small, **named)
            except (RuntimeError, IndexError, TypeError) as error:
                if _ABOUT_DTYPES.search(str(error)):
                    raise
        self._accepted.add(key)


def _of_one_element(value: Any, has_sizes: bool) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.zeros((1,) * value.dim(), dtype=value.dtype)
    return 1 if has_sizes and type(value) is int else value
