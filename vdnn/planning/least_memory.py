"""The smallest budget that any plan meets: every storage released at once and reloaded at its use.

No plan needs less memory at any point, so the figure is exact. A smaller budget raises BudgetError, which names the
point that needs the most.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from vdnn.bytesize import format_bytes
from vdnn.errors import BudgetError
from vdnn.planning.recorded_step import recorded_step
from vdnn.step.recording import PointKind, Recording

_BEFORE = "Parameters, optimizer state and what else there is before the step"


def least_bytes(recording: Recording) -> int:
    return max(recorded_step(recording).least_peaks)


def least_bytes_without_gradients(recording: Recording) -> int:
    """The same, if gradients left as they are made. Memory that is allocated during the step, is not managed and stays
    until its last use counts as gradients: a lower bound of them in every interval."""
    kept = [0] * (len(recording.points) + 1)
    for one in recording.lifetimes:
        kept[one.saves[0]] += one.nbytes
        kept[one.free_point] -= one.nbytes
    others = [
        point.allocated_bytes - held
        for point, held in zip(recording.points, itertools.accumulate(kept), strict=False)
        if point.kind is not PointKind.END
    ]
    staying = list(itertools.accumulate(reversed(others), min))[::-1]  # from each point to the last use
    gradients = [0, *(max(0, nbytes - recording.resident_bytes) for nbytes in staying)]
    return max(peak - nbytes for peak, nbytes in zip(recorded_step(recording).least_peaks, gradients, strict=False))


def require_feasible_budget(recording: Recording, budget_bytes: int) -> None:
    """Raises BudgetError if no plan is under the budget."""
    require_feasible(recording, recorded_step(recording).least_peaks, budget_bytes)


def as_if_feasible(recording: Recording, budget_bytes: int) -> Recording:
    """The same step, with as much less memory in each interval that no plan brings under the budget: a plan of it meets
    the budget in all the others."""
    over = [max(0, peak - budget_bytes) for peak in recorded_step(recording).least_peaks]
    points = tuple(
        replace(
            point,
            peak_bytes=point.peak_bytes - before,
            allocated_bytes=point.allocated_bytes - max(before, behind),
        )
        for point, before, behind in zip(recording.points, over, [*over[1:], 0], strict=True)
    )
    return replace(recording, points=points)


def require_feasible(recording: Recording, peaks: Sequence[int], budget_bytes: int) -> None:
    """Raises BudgetError if one of `peaks`, those of every interval with everything offloaded, exceeds the budget."""
    least = max(peaks)
    if least <= budget_bytes:
        return
    where = peaks.index(least)
    raise BudgetError(
        budget_bytes=budget_bytes,
        least_bytes=least,
        where=describe_interval(recording, where),
        resident_bytes=recording.resident_bytes,
        way_out=smaller_state(_BEFORE, recording.resident_bytes, budget_bytes, least),
    )


def smaller_state(what: str, state_bytes: int, budget_bytes: int, least: int) -> str:
    """The way out if parameters, gradients and optimizer state, which a plan does not move, exceed the budget by
    themselves. Empty if they do not."""
    if state_bytes <= budget_bytes:
        return ""
    return (
        f"{what} alone take {format_bytes(state_bytes)}, so a smaller batch does not help. Train fewer parameters "
        "(LoRA), keep them in a smaller dtype, take an optimizer with less state, shard them over several cards "
        f"(FSDP2, ZeRO), or raise the budget to {format_bytes(least)} ({least} bytes)."
    )


def describe_interval(recording: Recording, interval: int) -> str:
    """The interval in words, for messages."""
    point = recording.points[interval]
    if point.key is not None:
        return f"point {interval}, before the save of {point.key}"
    if point.lifetime is not None:
        key = recording.points[recording.lifetimes[point.lifetime].saves[0]].key
        return f"point {interval}, in backward, before the use of {key}"
    return f"point {interval}, after the last use (the optimizer's step, if it is part of the step)"
