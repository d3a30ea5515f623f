"""Calls of the user's program that name the GPU, where tensors on the CPU stand for the card's.

`torch.autocast("cuda")` then means those tensors, so that a program that has mixed precision is seen to have it;
`torch.cuda.synchronize()` is counted, and waits for nothing where there is no GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.amp.autocast_mode import autocast


@contextlib.contextmanager
def card_calls(*, stands_for_card: bool, on_synchronize: Callable[[], None]) -> Iterator[None]:
    """While entered. `stands_for_card`: the tensors are the CPU's."""
    initialize, synchronize = autocast.__init__, torch.cuda.synchronize

    def as_the_card(made: autocast, device_type: str, dtype: torch.dtype | None = None, **options: Any) -> None:
        if stands_for_card and device_type == "cuda":
            device_type, dtype = "cpu", dtype or torch.get_autocast_dtype("cuda")
        initialize(made, device_type, dtype, **options)

    def counted(device: Any = None) -> None:
        on_synchronize()
        if not stands_for_card:
            synchronize(device)

    autocast.__init__, torch.cuda.synchronize = as_the_card, counted  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        autocast.__init__, torch.cuda.synchronize = initialize, synchronize  # type: ignore[method-assign]
