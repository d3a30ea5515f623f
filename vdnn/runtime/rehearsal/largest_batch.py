"""Searches for the largest batch that fits. Each trial costs a rehearsal or a run, so few batches are tried.

Memory grows by about the same bytes for each sample: a line through two known batches says where it meets the limit.
Trials that only say whether a batch fits are doubled or halved, and then bisected.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from vdnn.errors import VdnnError
from vdnn.hardware import HardwareProfile
from vdnn.planning.costs import profile_costs
from vdnn.planning.least_memory import least_bytes
from vdnn.planning.planned_step import plan_step
from vdnn.planning.policies import PlanPolicy
from vdnn.runtime.rehearsal.rehearsal import rehearse, subject_of
from vdnn.step.recording import Recording

MOST = 1 << 20
# While no batch is known not to fit, the next one is at most this many times as large.
_GROWTH = 8
# One trial in this many ignores the line, so that the search ends soon if memory grows in jumps.
_HALVES_EVERY = 4


class CannotSearch(VdnnError):
    """A trial failed for another reason than memory. The message begins with its batch."""


def find_largest_batch(
    spare_bytes: Callable[[int], float],
    *,
    first: int,
    most: int = MOST,
    on_progress: Callable[[str], None] = lambda doing: None,
) -> int:
    """The largest batch that fits, at most `most`; 0 if none does. A batch smaller than one that fits also has to fit.

    * `spare_bytes`: the bytes that a batch leaves of the limit, negative if it does not fit. If only that is known:
      math.inf or -math.inf. Called once for each batch that is tried.
    * `first`: the batch that is tried first.
    * `on_progress`: called with a phrase before each trial.

    Raises CannotSearch in place of a VdnnError of `spare_bytes`. Other errors pass through.
    """
    known: dict[int, float] = {}
    fits, over, batch = 0, most + 1, min(first, most)
    while fits + 1 < over:
        on_progress(f"trying batch {batch}")
        try:
            known[batch] = spare_bytes(batch)
        except VdnnError as error:
            raise CannotSearch(f"at batch {batch}: {error}") from error
        if known[batch] >= 0:
            fits = batch
        else:
            over = batch
        highest = over - 1 if over <= most else min(_GROWTH * fits, most)
        batch = min(max(_next(known, fits, over, most), fits + 1), highest)
    return fits


def or_more(batch: int) -> str:
    """The batch, and whether the search stopped there."""
    return f"{batch} or more" if batch == MOST else str(batch)


def _next(known: dict[int, float], fits: int, over: int, most: int) -> int:
    """The batch to try, before it is limited to those between `fits` and `over`."""
    nearest = sorted((batch for batch in known if math.isfinite(known[batch])), key=lambda batch: abs(known[batch]))[:2]
    if len(nearest) == 2 and len(known) % _HALVES_EVERY:
        one, other = nearest
        bytes_a_sample = (known[other] - known[one]) / (one - other)
        if bytes_a_sample > 0:
            return one + math.floor(known[one] / bytes_a_sample)
    return 2 * fits if over > most else (fits + over) // 2


class LargestBatches(NamedTuple):
    """The largest batch with everything kept, and the largest that any plan makes fit. At that one the step takes
    `slowdown` times as long as with everything kept."""

    kept: int
    planned: int
    slowdown: float


def largest_batches(
    make: Callable[[int], Any],
    profile: HardwareProfile,
    budget_bytes: int,
    *,
    first: int,
    policy: str | PlanPolicy = "auto",
    optimizer: str | None = None,
    min_bytes: int | str = "1MiB",
    on_progress: Callable[[str], None] = lambda doing: None,
) -> LargestBatches:
    """The largest batches of a function of a batch size under a budget, as plan() takes both. Each batch is rehearsed
    once. For the other arguments see rehearse() and find_largest_batch()."""
    known: dict[int, tuple[int, int]] = {}
    last: dict[int, Recording] = {}

    def recorded(batch: int) -> Recording:
        return rehearse(subject_of(make, batch), profile, optimizer=optimizer, min_bytes=min_bytes).recording

    def needs(batch: int) -> tuple[int, int]:
        if batch not in known:
            recording = recorded(batch)
            known[batch] = recording.peak_bytes, least_bytes(recording)
            if known[batch][1] <= budget_bytes and batch >= max(last, default=0):
                last.clear()
                last[batch] = recording
        return known[batch]

    kept = find_largest_batch(lambda batch: budget_bytes - needs(batch)[0], first=first, on_progress=on_progress)
    planned = find_largest_batch(
        lambda batch: budget_bytes - needs(batch)[1], first=max(first, kept), on_progress=on_progress
    )
    slowdown = 1.0
    if planned > kept:
        on_progress(f"planning batch {planned}")
        slowdown = plan_step(last[planned], profile_costs(profile), budget_bytes, policy).slowdown
    return LargestBatches(kept, planned, slowdown)
