"""Budgets as users write them: bytes ("12GiB"), a share of the device ("80%"), or the least there is ("min")."""

from __future__ import annotations

import re
from dataclasses import dataclass

from vdnn.bytesize import format_bytes, parse_bytes

# The share of a card's memory that is left free without a budget, for what the count of tensors does not include:
# fragmentation, and the workspaces of libraries.
RESERVE = 0.1
_PERCENT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*%\s*")


@dataclass(frozen=True, slots=True)
class Budget:
    """`nbytes` or `share` is set, or neither: the budget is then the least that any plan meets."""

    nbytes: int | None = None
    share: float | None = None

    @property
    def is_least(self) -> bool:
        return self.nbytes is None and self.share is None

    def __str__(self) -> str:
        if self.nbytes is not None:
            return format_bytes(self.nbytes)
        return "the least" if self.share is None else f"{100 * self.share:g} % of the device"

    def bytes_for(self, device_bytes: int | None, least_bytes: int) -> int:
        """The budget in bytes on a device of `device_bytes`, for a step that needs at least `least_bytes`."""
        if self.share is not None and device_bytes is None:
            raise ValueError("budget: a share needs a device whose memory is known. Give the budget in bytes.")
        fixed_bytes = self.fixed_bytes(device_bytes)
        if fixed_bytes is not None:
            return fixed_bytes
        # A device with less memory raises its own error.
        return least_bytes if device_bytes is None else min(least_bytes, device_bytes)

    def fixed_bytes(self, device_bytes: int | None) -> int | None:
        """The budget in bytes of every step; None for "min", and for a share of a device that is not known."""
        if self.nbytes is not None:
            if device_bytes is not None and self.nbytes > device_bytes:
                raise ValueError(
                    f"budget: {format_bytes(self.nbytes)} is more than the device has, {format_bytes(device_bytes)}."
                )
            return self.nbytes
        return None if self.share is None or device_bytes is None else int(device_bytes * self.share)


def bytes_without_budget(device_bytes: int) -> int:
    """The memory that a step may take on a device if no budget is given: all but the reserve."""
    return int(device_bytes * (1 - RESERVE))


def parse_budget(budget: int | str) -> Budget:
    """Errors begin with the name of the argument, `budget`."""
    if isinstance(budget, str):
        if budget.strip().lower() == "min":
            return Budget()
        percent = _PERCENT.fullmatch(budget)
        if percent is not None:
            share = float(percent[1]) / 100
            if not 0 < share <= 1:
                raise ValueError(f"budget: expected more than 0 % and at most 100 % of the device, got {budget!r}.")
            return Budget(share=share)
    try:
        return Budget(nbytes=parse_bytes(budget))
    except (TypeError, ValueError) as error:
        raise type(error)(f'budget: {error} A share of the device ("80%") and "min" are accepted too.') from None
