"""Names the ways out of a budget that a whole training cannot meet, each rehearsed, with the memory that it needs.

The peak of a training is often its logits, which no placement moves: a part of the batch at a time makes them smaller,
and so does a loss that is computed in chunks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from vdnn.bytesize import format_bytes
from vdnn.errors import BudgetError, RehearsalError
from vdnn.runtime.rehearsal.chosen_passes import numbers_of_passes

# As `vdnn advise` does: fewer chunks leave more of the logits, and more of them take longer.
CHUNKS = 8
_WORTH = 0.95  # another loss has to need less than this share


def with_ways_out(
    refused: BudgetError,
    batch: int,
    least_bytes: Callable[[int, int, int], int],
    on_progress: Callable[[str], None] = lambda doing: None,
) -> BudgetError:
    """The error, with ways out. `least_bytes(batch, passes, chunks)` rehearses `passes` passes of `batch` each instead
    of one, with the loss in `chunks` chunks, or unchanged for 0."""
    ways = [f"Raise the budget to {format_bytes(refused.least_bytes)} ({refused.least_bytes} bytes)"]
    for passes in numbers_of_passes(batch)[1:]:
        size = batch // passes
        on_progress(f"rehearsing {passes} x {size}, because the batch does not fit")
        least = _if_it_runs(least_bytes, size, passes, 0)
        if least is not None and least <= refused.budget_bytes:
            ways.append(f"take {passes} micro-batches of {size} ({format_bytes(least)} are needed)")
            break
    on_progress("rehearsing the loss in chunks, because the batch does not fit")
    least = _if_it_runs(least_bytes, batch, 1, CHUNKS)
    if least is not None and least < _WORTH * refused.least_bytes:
        name = "torch.nn.LinearCrossEntropyLoss" if hasattr(torch.nn, "LinearCrossEntropyLoss") else "torch 2.13's own"
        ways.append(f"compute the loss in chunks of the logits, as {name} does ({format_bytes(least)} are needed)")
    if len(ways) == 1:
        return refused
    return BudgetError(
        budget_bytes=refused.budget_bytes,
        least_bytes=refused.least_bytes,
        where=refused.where,
        resident_bytes=refused.resident_bytes,
        way_out=", or ".join([", ".join(ways[:-1]), ways[-1]]),
    )


def _if_it_runs(least_bytes: Callable[[int, int, int], int], batch: int, passes: int, chunks: int) -> int | None:
    """None if that cannot be rehearsed: the program may need the whole batch."""
    try:
        return least_bytes(batch, passes, chunks)
    except RehearsalError:
        return None
