"""Stand-ins: what a rehearsal answers when a program asks for a value or a size that depends on data or weights.

Each answer is counted by the line that asked, so that a report can name them. The assumptions behind them are
expectations.py's: uniform routing, a finite loss, nothing NaN.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from vdnn.runtime.rehearsal.chosen_sizes import chosen_by_mask, run_with_size
from vdnn.runtime.rehearsal.expectations import Expectations
from vdnn.runtime.rehearsal.source_place import user_place

_aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class StandIn:
    """`answer` was given `count` times to the line at `place`."""

    place: str
    answer: str
    count: int

    def __str__(self) -> str:
        times = "" if self.count == 1 else f" ({self.count} times)"
        return f"{self.place}: {self.answer}{times}"


class StandIns:
    """Answers and counts them."""

    def __init__(self, expectations: Expectations) -> None:
        self._expectations = expectations
        self._given: Counter[tuple[str, str]] = Counter()

    def begin_step(self) -> None:
        self._given.clear()

    @property
    def given(self) -> tuple[StandIn, ...]:
        return tuple(StandIn(place, answer, count) for (place, answer), count in self._given.most_common())

    def answers(self, func: Any) -> bool:
        return func in _ANSWERS

    def answer(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of an operation whose result or its size depends on unknown values."""
        said, result = _ANSWERS[func](self._expectations, func, args, kwargs)
        self._given[user_place(), said] += 1
        return result


_Answer = Callable[[Expectations, Any, tuple[Any, ...], dict[str, Any]], tuple[str, Any]]


def _value(expectations: Expectations, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, Any]:
    mean, dtype = expectations.of(args[0]).mean, args[0].dtype
    value: bool | int | float
    if dtype is torch.bool:
        value = mean is not None and mean >= 0.5
    elif dtype.is_floating_point or dtype.is_complex:
        value = 1.0 if mean is None else mean
    else:
        value = 1 if mean is None else round(mean)
    return f"a value that depends on data was taken as {value:g}" if type(value) is float else (
        f"a value that depends on data was taken as {value}"
    ), value


def _same_values(
    expectations: Expectations, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[str, Any]:
    return "two tensors were taken as equal", True


def _chosen(expectations: Expectations, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, Any]:
    mask = chosen_by_mask(func, args)
    if mask is None:
        raise RuntimeError(f"{func}: expected a mask that decides the size of its result, got none.")
    mean = expectations.of(mask).mean
    share = 1.0 if mean is None else min(1.0, mean)
    size = round(mask.numel() * share)
    out = run_with_size(func, args, size)
    return f"a mask was taken to choose {share:.3g} of its elements", out


def _distinct(expectations: Expectations, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, Any]:
    """The values of unique(): all taken as different. Its other results have the shapes that torch gives them."""
    source = args[0]
    index = torch.empty(source.shape, dtype=torch.int64)
    counts = torch.empty(source.numel(), dtype=torch.int64)
    return "all elements were taken as different", (source.reshape(-1).clone(), index, counts)


def _counted(expectations: Expectations, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, Any]:
    below = expectations.of(args[0]).below or 1
    bins = max(below, kwargs.get("minlength", args[2] if len(args) > 2 else 0))
    weights = kwargs.get("weights", args[1] if len(args) > 1 else None)
    out = torch.empty(bins, dtype=torch.int64 if weights is None else weights.dtype)
    expectations.follow(func, args, kwargs, out)
    return f"values were taken to be below {bins}", out


def _repeated(expectations: Expectations, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, Any]:
    mean = expectations.of(args[0]).mean
    size = round(args[0].numel() * (1.0 if mean is None else mean))
    return f"{size} repetitions were assumed", torch.empty(size, dtype=torch.int64)


def _aligned(expectations: Expectations, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, Any]:
    """CTC's losses and its table of alignments, which is as wide as the longest target."""
    probabilities, targets = args[0], args[1]
    batch = probabilities.shape[1]
    longest = targets.shape[1] if targets.dim() == 2 else math.ceil(targets.numel() / batch)
    losses = probabilities.new_empty(batch)
    table = probabilities.new_empty(batch, probabilities.shape[0], 2 * longest + 1)
    return f"CTC's longest target was taken as {longest}", (losses, table)


_ANSWERS: dict[Any, _Answer] = {
    _aten._local_scalar_dense.default: _value,
    _aten.equal.default: _same_values,
    **dict.fromkeys((_aten.nonzero.default, _aten.masked_select.default, _aten.index.Tensor), _chosen),
    **dict.fromkeys((_aten._unique2.default, _aten.unique_consecutive.default), _distinct),
    _aten.bincount.default: _counted,
    _aten.repeat_interleave.Tensor: _repeated,
    **dict.fromkeys((_aten._ctc_loss.Tensor, _aten._ctc_loss.default), _aligned),
}
