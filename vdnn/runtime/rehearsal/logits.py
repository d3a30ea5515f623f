"""Watches which linear makes the logits of a cross entropy, and rehearses both as torch's loss in chunks does them.

In a first step the watch only looks. If it replaces, later steps run no linear whose output becomes logits: a tensor of
one number, expanded, takes its place, and the loss runs as torch.nn.LinearCrossEntropyLoss runs on a card. Torch's own
operation cannot be rehearsed, because its kernels and its memory are inside one opaque operator.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

TENSOR = torch.Tensor
_COPIES = (TENSOR.float, TENSOR.to, TENSOR.contiguous, TENSOR.type, TENSOR.bfloat16, TENSOR.half)
_VIEWS = (
    TENSOR.view,
    TENSOR.reshape,
    TENSOR.flatten,
    TENSOR.__getitem__,
    TENSOR.transpose,
    TENSOR.permute,
    TENSOR.squeeze,
    TENSOR.unsqueeze,
    torch.flatten,
    torch.reshape,
    torch.transpose,
    torch.squeeze,
)


class _Linear(NamedTuple):
    """The arguments of a call of linear. `input` is None if it ran: a reference would keep an activation alive."""

    input: torch.Tensor | None
    weight: torch.Tensor
    bias: torch.Tensor | None
    dtype: torch.dtype


class LogitsWatch(TorchFunctionMode):
    """`logits_bytes` is the size of the largest logits that a linear layer made for a cross entropy, and `rows` their
    number of rows; `classes` and `features` are the sizes of that linear. `chunk_rows`: replaces them, in chunks of
    this many rows."""

    def __init__(self, chunk_rows: int = 0) -> None:
        super().__init__()
        self.logits_bytes = self.rows = self.classes = self.features = 0
        self._chunk_rows = chunk_rows
        self._feeding: set[int] = set()  # weights of linears that made logits in an earlier step
        self._seen: set[int] = set()
        self._made: dict[int, tuple[weakref.ref[torch.Tensor], _Linear]] = {}

    def replace_in(self, chunks: int) -> None:
        """From the next step on the loss is computed in this number of chunks."""
        self._chunk_rows = max(1, -(-self.rows // chunks))

    def begin_step(self) -> None:
        self._feeding |= self._seen
        self._made.clear()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is functional.linear:
            return self._linear(func, *args, **kwargs)
        if func is functional.cross_entropy:
            return self._loss(func, args, kwargs)
        source = self._source(args[0]) if args and (func in _VIEWS or func in _COPIES) else None
        if source is None:
            return func(*args, **kwargs)
        if func in _COPIES and source.input is not None:
            dtype = _dtype_after(func, args, kwargs)
            made = args[0] if dtype is None else _expanded(args[0].shape, dtype)
        else:
            made = func(*args, **kwargs)
        return self._note(made, source)

    def _linear(
        self, func: Callable[..., Any], input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        if not self._chunk_rows or id(weight) not in self._feeding:
            made = func(input, weight, bias)
            return self._note(made, _Linear(None, weight, bias, made.dtype))
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else input.dtype
        made = _expanded((*input.shape[:-1], weight.shape[0]), dtype)
        return self._note(made, _Linear(input, weight, bias, dtype))

    def _loss(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        logits = args[0] if args else kwargs["input"]
        target = args[1] if len(args) > 1 else kwargs["target"]
        source = self._source(logits)
        # As torch's own: class indices, no smoothing, no weights of classes.
        is_plain = target.dtype is torch.int64 and not kwargs.get("label_smoothing") and kwargs.get("weight") is None
        if source is None or not is_plain or len(args) > 2:
            return func(*args, **kwargs)
        self._seen.add(id(source.weight))
        nbytes = logits.numel() * logits.itemsize
        if nbytes > self.logits_bytes:
            self.logits_bytes, self.rows = nbytes, target.numel()
            (self.classes, self.features) = source.weight.shape
        if source.input is None:
            return func(*args, **kwargs)
        self._made.clear()
        rows = target.numel()
        hidden = source.input.reshape(-1, source.input.shape[-1])[:rows].to(source.dtype)
        apply: Any = _ChunkedLoss.apply
        loss = apply(hidden, source.weight.to(source.dtype), target.reshape(-1), self._chunk_rows)
        return loss.expand(rows) if kwargs.get("reduction") == "none" else loss

    def _note(self, made: torch.Tensor, source: _Linear) -> torch.Tensor:
        self._made[id(made)] = weakref.ref(made), source
        return made

    def _source(self, tensor: object) -> _Linear | None:
        known = self._made.get(id(tensor))
        return known[1] if known is not None and known[0]() is tensor else None


class _ChunkedLoss(torch.autograd.Function):
    """The kernels of torch's loss in chunks, as its policy "compact" calls them on a card. Forward makes the
    gradients of the input and of the weight chunk by chunk, and backward scales them in place."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, rows: int) -> torch.Tensor:
        input_gradient, weight_gradient = torch.empty_like(hidden), torch.zeros_like(weight)
        total = torch.zeros((), dtype=torch.float32)
        for begin in range(0, hidden.shape[0], rows):
            part, labels = hidden[begin : begin + rows], target[begin : begin + rows]
            scores = torch.log_softmax(part @ weight.t(), -1, dtype=torch.float32)
            total += scores.gather(1, labels.clamp_min(0).unsqueeze(1)).sum()
            gradient = scores.exp_().to(hidden.dtype)
            del scores
            torch.mm(gradient, weight, out=input_gradient[begin : begin + rows])
            weight_gradient.addmm_(gradient.t(), part)
            del gradient
        ctx.gradients = input_gradient, weight_gradient
        return total / hidden.shape[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (scale,) = gradients
        input_gradient, weight_gradient = ctx.gradients
        ctx.gradients = None
        return input_gradient.mul_(scale), weight_gradient.mul_(scale), None, None


def _expanded(shape: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(1, dtype=dtype, requires_grad=True).expand(shape)


def _dtype_after(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype | None:
    named = {TENSOR.float: torch.float32, TENSOR.bfloat16: torch.bfloat16, TENSOR.half: torch.float16}
    given = [one for one in (*args[1:], *kwargs.values()) if isinstance(one, torch.dtype)]
    return named.get(func) or (given[0] if given else None)
