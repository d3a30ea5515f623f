"""Decides if a recorded step needs a plan: one of its own, or another one than that which it followed."""

from __future__ import annotations

from vdnn.runtime.steps.ladder import Ladder, Rung, Source
from vdnn.step.made_steps import first_save
from vdnn.step.recording import Recording

# A step that is larger than its plan by no more than this is not planned anew: its guard balances that.
_TOLERANCE = 1.01
# What recorded steps told of another one was mistaken if its peak is off by this share, or its time shorter by that.
_MISTAKEN_PEAK = 0.01
_MISTAKEN_TIME = 0.05


def needs_plan(ladder: Ladder, rung: Rung | None, recording: Recording, *, is_planned: bool, has_grown: bool) -> bool:
    """True if a recorded step had no plan of its size, or was larger than its plan, or so much smaller that it deserves
    another one. `rung`: the one of its kind that it followed."""
    first = first_save(recording)
    if not is_planned:
        return not ladder.find_near(first, recording)
    if rung is None:
        return False  # it followed a plan of another kind, and its own has some
    if has_grown:
        return recording.managed_bytes > _TOLERANCE * rung.nbytes
    rung.served(first)
    return ladder.deserves_own(rung, first)


def is_mistaken(rung: Rung, predicted: Recording | None, recorded: Recording) -> bool:
    """True if the step that followed this rung is not as predicted."""
    if predicted is None or rung.source is Source.RECORDED:
        return False
    wrong_bytes = abs(recorded.peak_bytes - predicted.peak_bytes)
    is_shorter = recorded.compute_ns < (1 - _MISTAKEN_TIME) * predicted.compute_ns
    return is_shorter or wrong_bytes > _MISTAKEN_PEAK * recorded.peak_bytes
