"""Replaces calls of the user's program that name the GPU, while CPU tensors stand for those of the card.

`torch.autocast("cuda")` then applies to the CPU tensors, so that the advisor sees the program's mixed precision.
`torch.cuda.synchronize()` is counted, and does nothing else if CPU tensors stand for the card.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.amp.autocast_mode import autocast


@contextlib.contextmanager
def card_calls(*, stands_for_card: bool, on_synchronize: Callable[[], None]) -> Iterator[None]:
    """A context in which those calls are replaced. `stands_for_card`: CPU tensors stand for those of the card."""
    initialize, synchronize = autocast.__init__, torch.cuda.synchronize

    def initialize_for_card(
        context: autocast, device_type: str, dtype: torch.dtype | None = None, **options: Any
    ) -> None:
        if stands_for_card and device_type == "cuda":
            device_type, dtype = "cpu", dtype or torch.get_autocast_dtype("cuda")
        initialize(context, device_type, dtype, **options)

    def count_synchronize(device: Any = None) -> None:
        on_synchronize()
        if not stands_for_card:
            synchronize(device)

    autocast.__init__ = initialize_for_card  # type: ignore[method-assign, assignment]
    torch.cuda.synchronize = count_synchronize
    try:
        yield
    finally:
        autocast.__init__, torch.cuda.synchronize = initialize, synchronize  # type: ignore[method-assign]
