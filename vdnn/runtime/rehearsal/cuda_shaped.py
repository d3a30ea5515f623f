"""Makes a step on CPU tensors save what it would save on a GPU, for the operations in an audited table.

A CPU build of torch cannot run autograd on CUDA tensors without data, so rehearsals use CPU tensors. A few operations
save something else on the CPU. This mode calls them so that they save what CUDA's do:

  dropout            the CPU multiplies by a mask of the input's dtype and saves that; CUDA saves one byte an element.
                     Here: native_dropout, which is what CUDA runs.
  attention          the CPU has one fused kernel, without dropout. Here: CUDA's operations, chosen as torch chooses
                     them on the card (fused_attention.py).
  norms              see norm_statistics.py.

Mixed precision is cast by cuda_autocast.py.

`python -m benchmarks.cuda_saves` compares this with the saves of torch's own CUDA operations. Not translated, and
therefore not exact: cuDNN's reserve space of recurrent layers and of batch norms in NHWC, and workspaces, which no
recording of tensors contains.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from vdnn.runtime.rehearsal.fused_attention import attend
from vdnn.runtime.rehearsal.norm_statistics import NormStatistics

BACKEND = "cuda, as rehearsed on the CPU"


class CudaShaped(TorchFunctionMode):
    """Translates the operations of the table while it is entered, on the entering thread, to those of a card that
    `is_ampere` or newer."""

    def __init__(self, *, is_ampere: bool = True, statistics: NormStatistics | None = None) -> None:
        super().__init__()
        self._is_ampere = is_ampere
        self._statistics = statistics

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self.translated(func, args, kwargs or {})

    def translated(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls the function as it runs on the card."""
        if func is functional.scaled_dot_product_attention:
            return attend(*args, **kwargs, is_ampere=self._is_ampere)
        if func in _RMS_NORMS and self._statistics is not None:
            return self._statistics.rms_norm(func, *args, **kwargs)
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


_RMS_NORMS = (functional.rms_norm, torch.rms_norm)
_TABLE: dict[Callable[..., Any], Callable[..., Any]] = {
    functional.dropout: _dropout,
    torch.dropout: _torch_dropout,
}
