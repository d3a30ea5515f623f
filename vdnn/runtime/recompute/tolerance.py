"""How far a rebuilt value may be from the one that was there: not at all, or within what the user names.

[Note: What is measured] Of floats the furthest that two numbers at one place are apart, over the largest magnitude of
the original's finite numbers; of complex numbers, of their parts. What is not finite has to come back as it was, and
all else byte for byte. 0 is what differs in its bytes and not in its numbers: 0.0 and -0.0.
"""

from __future__ import annotations

import logging
import math

import torch

logger = logging.getLogger("vdnn")

_LEAST_ITEM = 4  # bytes: smaller floats are subtracted as floats of 32 bits


class Tolerance:
    """Of one session. `limit` None: bit for bit."""

    def __init__(self, limit: float | None = None) -> None:
        self.limit = limit
        self._followed: dict[str, float] = {}  # by recipe, the furthest that was seen

    def admits(self, difference: float) -> bool:
        return self.limit is not None and difference <= self.limit

    def follow(self, recipe: str, difference: float) -> None:
        """It is rebuilt although it differs, which is said once."""
        if recipe not in self._followed:
            logger.info(
                "vdnn: %s does not come out bit for bit (%.2g of the largest apart), and is rebuilt within the "
                "tolerance of %g.",
                recipe,
                difference,
                self.limit,
            )
        self._followed[recipe] = max(difference, self._followed.get(recipe, 0.0))

    def lines(self) -> list[str]:
        """For the report."""
        if self.limit is None:
            return []
        names = [f"{recipe} ({apart:.2g} of the largest apart)" for recipe, apart in self._followed.items()]
        within = "; ".join(names) or "what was rebuilt came out bit for bit"
        return [f"  rebuilt within the tolerance of {self.limit:g}: {within}"]


def check_tolerance(value: object) -> float | None:
    """The limit, if it is one."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"tolerance: expected a number such as 1e-6, or None for bit for bit, got {value!r}.")
    if not 0 <= value < 1:
        raise ValueError(f"tolerance: expected a share of the largest magnitude, from 0 to below 1, got {value!r}.")
    return float(value)


def difference_between(original: torch.Tensor, made: torch.Tensor, dtype: torch.dtype) -> float:
    """Of flat tensors of bytes. See [Note: What is measured]. Infinite where nothing but the same bytes would do. Waits
    for the device."""
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
