"""The tolerance: how far a recomputed value may be from the original. By default they have to be equal bit for bit.

[Note: Measure of a difference] The difference of two float tensors is the largest difference of two numbers at the same
index, divided by the largest magnitude of the original's finite numbers; for complex numbers, of their parts. Numbers
that are not finite have to be equal, and values of other dtypes byte for byte. The difference is 0 if bytes differ and
numbers do not: 0.0 and -0.0.
"""

from __future__ import annotations

import logging
import math

import torch

logger = logging.getLogger("vdnn")

_LEAST_ITEM = 4  # bytes: smaller floats are subtracted as floats of 32 bits


class Tolerance:
    """One session's tolerance. `limit` None: bit for bit."""

    def __init__(self, limit: float | None = None) -> None:
        self.limit = limit
        self._followed: dict[str, float] = {}  # the largest difference that was seen, by recipe

    def admits(self, difference: float) -> bool:
        return self.limit is not None and difference <= self.limit

    def follow(self, recipe: str, difference: float) -> None:
        """Note that a recipe is used although its result differs. The first time this is logged."""
        if recipe not in self._followed:
            logger.info(
                "vdnn: %s does not give the original bit for bit (difference: %.2g of the largest magnitude), and is "
                "recomputed within the tolerance of %g.",
                recipe,
                difference,
                self.limit,
            )
        self._followed[recipe] = max(difference, self._followed.get(recipe, 0.0))

    def lines(self) -> list[str]:
        """The lines of the report."""
        if self.limit is None:
            return []
        names = [
            f"{recipe} (difference: {difference:.2g} of the largest magnitude)"
            for recipe, difference in self._followed.items()
        ]
        within = "; ".join(names) or "every recomputed value was equal bit for bit"
        return [f"  recomputed within the tolerance of {self.limit:g}: {within}"]


def check_tolerance(value: object) -> float | None:
    """The limit. Raises TypeError or ValueError if `value` is not one."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"tolerance: expected a number such as 1e-6, or None for bit for bit, got {value!r}.")
    if not 0 <= value < 1:
        raise ValueError(f"tolerance: expected a share of the largest magnitude, from 0 to below 1, got {value!r}.")
    return float(value)


def difference_between(original: torch.Tensor, made: torch.Tensor, dtype: torch.dtype) -> float:
    """The difference of two flat tensors of bytes. See [Note: Measure of a difference]. Infinite if only equal bytes
    are allowed. Waits for the device."""
    if not (dtype.is_floating_point or dtype.is_complex) or original.nbytes % dtype.itemsize:
        return math.inf
    with torch.no_grad():
        first, second = _numbers(original.view(dtype)), _numbers(made.view(dtype))
        is_same = (first == second) | (first.isnan() & second.isnan())
        apart = float(torch.where(is_same, 0.0, (first - second).abs()).amax())
        if not apart:
            return 0.0
        largest = float(torch.where(first.isfinite(), first.abs(), 0.0).amax())
    return apart / largest if largest and math.isfinite(apart) else math.inf


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    return tensor.to(torch.float32) if tensor.itemsize < _LEAST_ITEM else tensor
