"""The peak of a step that is not measured in its hooks: read once, at its end.

torch's statistics have one peak since the user's last reset. Over a whole step they tell the step's own peak only if it
is higher than all before it. Otherwise the step counts as taking what the checked steps of its plan took: it repeats
them. A step whose peak is between the two is not seen.
"""

from __future__ import annotations

from vdnn.runtime.steps.watched_step import WatchedStep


class StepPeaks:
    """The peaks of the steps of one session."""

    def __init__(self) -> None:
        self._highest_bytes = 0  # of all steps

    def of(self, step: WatchedStep, last_bytes: int, *, is_exact: bool) -> int:
        """The peak of a finished step. `last_bytes`: since its last hook that was measured, or since its begin.
        `is_exact`: that is no upper bound."""
        executor = step.executor
        peak_bytes = max(step.peak_bytes, last_bytes)
        if step.meter is None and executor is not None and not is_exact and peak_bytes <= self._highest_bytes:
            return min(peak_bytes, executor.checked_bytes)
        self._highest_bytes = max(self._highest_bytes, peak_bytes)
        if step.meter is not None and executor is not None:
            executor.checked_steps += 1
            executor.checked_bytes = max(executor.checked_bytes, peak_bytes)
        return peak_bytes
