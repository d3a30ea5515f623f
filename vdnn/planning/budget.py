"""Budgets as users write them: bytes ("12GiB"), a share of the device ("80%"), or the least there is ("min")."""

from __future__ import annotations

import re
from dataclasses import dataclass

from vdnn.bytesize import format_bytes, parse_bytes

_PERCENT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*%\s*")


@dataclass(frozen=True, slots=True)
class Budget:
    """One of the two is set, or neither: then it is the least budget that any plan meets."""

    nbytes: int | None = None
    share: float | None = None

    def bytes_for(self, device_bytes: int | None, least_bytes: int) -> int:
        """On a device of that size, for a step that needs at least so much. A share is of the device."""
        if self.nbytes is not None:
            if device_bytes is not None and self.nbytes > device_bytes:
                raise ValueError(
                    f"budget: {format_bytes(self.nbytes)} is more than the device has, {format_bytes(device_bytes)}."
                )
            return self.nbytes
        if self.share is None:  # a device that has less says so itself
            return least_bytes if device_bytes is None else min(least_bytes, device_bytes)
        if device_bytes is None:
            raise ValueError("budget: a share needs a device whose memory is known; give the budget in bytes.")
        return int(device_bytes * self.share)


def parse_budget(budget: int | str) -> Budget:
    """What is wrong with it is said with the name of the argument."""
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
        raise type(error)(f'budget: {error} A share of the device ("80%") and "min" are budgets too.') from None
