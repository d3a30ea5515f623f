"""Makes a step on CPU tensors save what it would save on a GPU, for the operations in an audited table.

A CPU build of torch cannot run autograd on CUDA tensors without data, so rehearsals use CPU tensors. A few operations
save something else on the CPU. This mode calls them so that they save what CUDA's do:

  dropout            the CPU multiplies by a mask of the input's dtype and saves that; CUDA saves one byte an element.
                     Here: native_dropout, which is what CUDA runs.
  attention          with dropout the CPU falls back to plain attention and saves the whole matrix; CUDA's fused
                     kernels draw the dropout inside. Here: without the dropout, which saves the same.

Not translated, and therefore not exact: cuDNN's reserve space of recurrent layers and of batch norms in NHWC, the
seeds of fused attention (16 bytes each), autocast's lists, which differ between the two, and workspaces, which no
recording of tensors contains.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from vdnn.runtime.recompute.norm_calls import remove_stale_mode

BACKEND = "cuda, as rehearsed on the CPU"


class CudaShaped(TorchFunctionMode):
    """Translates the operations of the table while it is entered, on the entering thread."""

    passes_norms_on: ClassVar[bool] = True  # see recompute/norm_calls.py

    def __exit__(self, *exception: Any) -> None:
        remove_stale_mode()
        super().__exit__(*exception)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        translation = _TABLE.get(func)
        return func(*args, **kwargs) if translation is None else translation(func, *args, **kwargs)


def _dropout(
    func: Callable[..., Any], input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Any:
    if not training or p == 0.0 or inplace:
        return func(input, p, training, inplace)
    return torch.native_dropout(input, p, training)[0]


def _torch_dropout(func: Callable[..., Any], input: torch.Tensor, p: float, train: bool) -> Any:
    return torch.native_dropout(input, p, train)[0] if train and p > 0 else func(input, p, train)


def _attention(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if len(args) > 4:
        args = (*args[:4], 0.0, *args[5:])
    kwargs.pop("dropout_p", None)
    return func(*args, **kwargs)


_TABLE: dict[Callable[..., Any], Callable[..., Any]] = {
    functional.dropout: _dropout,
    torch.dropout: _torch_dropout,
    functional.scaled_dot_product_attention: _attention,
}
