"""Expectations: what is assumed of tensors whose values depend on data or weights, for stand-ins of their values.

An expectation is the mean of a tensor's elements, so that of a mask is the share of its true elements. It begins where
something is known without data: indices of `topk` are below the number of what was chosen from, so one expert of eight
gets an eighth of the tokens (uniform routing); nothing is NaN or infinite. Operations on masks and counts carry it on.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Expectation:
    """`mean` of the elements, and for indices the number `below` which they are. None where nothing is assumed."""

    mean: float | None = None
    below: int | None = None


_NOTHING = Expectation()


class Expectations:
    """Expectations by storage, as long as it is alive."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[weakref.ref[torch.UntypedStorage], Expectation]] = {}

    def of(self, tensor: Any) -> Expectation:
        if not isinstance(tensor, torch.Tensor):
            return Expectation(float(tensor)) if isinstance(tensor, (bool, int, float)) else _NOTHING
        if tensor.layout is not torch.strided:
            return _NOTHING
        storage = tensor.untyped_storage()
        found = self._held.get(storage._cdata)
        return _NOTHING if found is None or found[0]() is not storage else found[1]

    def assume(self, tensor: torch.Tensor, expectation: Expectation) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if expectation == _NOTHING:
            self._held.pop(key, None)
        else:
            self._held[key] = (weakref.ref(storage, lambda gone: self._drop(key, gone)), expectation)

    def follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Carries expectations from the arguments of an operation to its results."""
        rule = _RULES.get(func._overloadpacket.__name__.removesuffix("_"))
        if rule is None:
            return
        found = rule(self.of, args, kwargs, out)
        for tensor, expectation in found if isinstance(found, list) else [(out, found)]:
            if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
                self.assume(tensor, expectation)

    def has(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._held

    def follows(self, func: Any) -> bool:
        """Do the expectations of its arguments decide on those of its results?"""
        return func._overloadpacket.__name__.removesuffix("_") in _RULES

    def are_new(self, func: Any) -> bool:
        """May its results have an expectation where no argument is a tensor that has one?"""
        rule = _RULES.get(func._overloadpacket.__name__.removesuffix("_"))
        return rule is not None and rule not in _CARRY

    def _drop(self, key: int, gone: weakref.ref[torch.UntypedStorage]) -> None:
        found = self._held.get(key)
        if found is not None and found[0] is gone:
            del self._held[key]


_Of = Callable[[Any], Expectation]
_Found = Expectation | list[tuple[Any, Expectation]]


def _same(of: _Of, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> _Found:
    return of(args[0])


def _constant(mean: float) -> Callable[..., _Found]:
    return lambda of, args, kwargs, out: Expectation(mean)


def _equal(of: _Of, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> _Found:
    if args[0] is args[1]:
        return Expectation(1.0)  # the test for NaN
    left, right = of(args[0]), of(args[1])
    below = left.below or right.below
    if below:
        return Expectation(1.0 / below)
    # A count may be known where its elements are not: `x.isnan().sum() == 0` holds.
    is_counted = not args[0].is_floating_point() and left.mean is not None
    return Expectation(float(is_counted and left.mean == right.mean))


def _not_equal(of: _Of, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> _Found:
    equal = _equal(of, args, kwargs, out)
    return Expectation(1.0 - (equal.mean or 0.0)) if isinstance(equal, Expectation) else equal


def _product(of: _Of, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> _Found:
    left, right = of(args[0]).mean, of(args[1]).mean
    return _NOTHING if left is None or right is None else Expectation(left * right)


def _compared(holds: Callable[[float, float], bool]) -> Callable[..., _Found]:
    def rule(of: _Of, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> _Found:
        left, right = of(args[0]), of(args[1])
        for one, other, is_left in ((left, right, True), (right, left, False)):
            if one.below and other.mean is not None:  # indices spread evenly over those below
                share = min(1.0, max(0.0, other.mean / one.below))
                return Expectation(share if holds(0, 1) is is_left else 1 - share)
        if left.mean is None or right.mean is None:
            return _NOTHING
        return Expectation(float(holds(left.mean, right.mean)))

    return rule


def _not(of: _Of, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> _Found:
    mean = of(args[0]).mean
    return _NOTHING if mean is None or out.dtype is not torch.bool else Expectation(1.0 - min(1.0, mean))


def _both(of: _Of, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> _Found:
    means = [of(one).mean for one in args[:2]]
    return _NOTHING if None in means else Expectation(min(one for one in means if one is not None))


def _either(of: _Of, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> _Found:
    means = [of(one).mean for one in args[:2]]
    return _NOTHING if None in means else Expectation(max(one for one in means if one is not None))


def _any(of: _Of, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> _Found:
    mean = of(args[0]).mean
    return Expectation(float(mean is not None and mean > 0))


def _all(of: _Of, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> _Found:
    mean = of(args[0]).mean
    return Expectation(float(mean is None or mean >= 1))


def _sum(of: _Of, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> _Found:
    mean = of(args[0]).mean
    return _NOTHING if mean is None else Expectation(mean * args[0].numel() / max(1, out.numel()))


def _counts(of: _Of, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> _Found:
    return Expectation(args[0].numel() / max(1, out.numel()))


def _indices(position: int) -> Callable[..., _Found]:
    """The results that are indices along a dimension, the argument at `position`, which defaults to the last one."""

    def rule(of: _Of, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> _Found:
        source, indices = args[0], out if isinstance(out, torch.Tensor) else out[1]
        dim = kwargs.get("dim", args[position] if len(args) > position else -1)
        below = source.numel() if dim is None or not source.dim() else source.shape[dim]
        return [(indices, Expectation((below - 1) / 2, below))]

    return rule


def _extreme(of: _Of, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> _Found:
    return of(args[0]) if isinstance(out, torch.Tensor) else _indices(1)(of, args, kwargs, out)


def _scattered(of: _Of, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> _Found:
    """`zeros.scatter(dim, indices, 1)`: as many elements are set as there are indices."""
    base, dim, index, value = args[0], args[1], args[2], args[3] if len(args) > 3 else kwargs.get("value")
    mean = of(value).mean
    if mean is None or not base.dim():
        return _NOTHING
    return Expectation(mean * min(1.0, index.shape[dim] / max(1, base.shape[dim])))


_RULES: dict[str, Callable[..., _Found]] = {
    **dict.fromkeys(("_to_copy", "clone", "contiguous", "expand", "index", "copy", "amax", "amin", "mean"), _same),
    **dict.fromkeys(("isnan", "isinf", "isposinf", "isneginf", "randn", "normal", "randn_like"), _constant(0.0)),
    **dict.fromkeys(("isfinite",), _constant(1.0)),
    **dict.fromkeys(("rand", "rand_like", "uniform"), _constant(0.5)),
    "eq": _equal,
    "ne": _not_equal,
    "mul": _product,
    "lt": _compared(lambda left, right: left < right),
    "le": _compared(lambda left, right: left <= right),
    "gt": _compared(lambda left, right: left > right),
    "ge": _compared(lambda left, right: left >= right),
    **dict.fromkeys(("logical_not", "bitwise_not"), _not),
    **dict.fromkeys(("logical_and", "bitwise_and", "__and__"), _both),
    **dict.fromkeys(("logical_or", "bitwise_or", "__or__"), _either),
    "any": _any,
    "all": _all,
    "sum": _sum,
    **dict.fromkeys(("bincount", "histc"), _counts),
    "topk": _indices(2),
    **dict.fromkeys(("argmax", "argmin", "sort", "argsort"), _indices(1)),
    **dict.fromkeys(("max", "min"), _extreme),
    "scatter": _scattered,
}
_CARRY = frozenset({_same, _product, _not, _both, _either, _sum, *(_RULES[name] for name in ("lt", "le", "gt", "ge"))})
