"""The peak of a step that is not measured in its hooks: read once, at its end.

torch's statistics have one peak, since the user's last reset. Over a whole step they tell the step's own peak only if
it rose in the step. Otherwise the step counts as taking what the checked steps of its plan took: it repeats them.
"""

from __future__ import annotations

from vdnn.runtime.steps.watched_step import WatchedStep


def peak_of(step: WatchedStep, last_bytes: int, before_bytes: int) -> int:
    """The peak of a finished step. `last_bytes`: since its last hook that was measured, or since its begin. It tells
    nothing if it is no more than `before_bytes`: something before the step may have taken it."""
    executor = step.executor
    peak_bytes = max(step.peak_bytes, last_bytes)
    if executor is None:
        return peak_bytes
    if step.meter is None and peak_bytes <= before_bytes:
        return min(peak_bytes, executor.checked_bytes)
    if step.meter is not None:
        executor.checked_steps += 1
        executor.checked_bytes = max(executor.checked_bytes, peak_bytes)
    return peak_bytes
