"""The times at which a step reaches its points, and the times of copies, as published policies estimate them.

The estimate assumes that the step never waits for a copy and that each copy has the link to itself. simulate() predicts
the exact times of a plan.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from itertools import accumulate

from vdnn.planning.costs import LinkCosts
from vdnn.step.recording import Recording
from vdnn.step.timeline import Track


class StepClock:
    """The clock of one recorded step over one link. `reached_ns` has the time of every point."""

    def __init__(self, recording: Recording, costs: LinkCosts) -> None:
        self.reached_ns = list(accumulate(point.compute_ns for point in recording.points))
        self._costs = costs

    def to_host_ns(self, nbytes: int) -> int:
        return self._copy_ns(nbytes, Track.TO_HOST)

    def to_device_ns(self, nbytes: int) -> int:
        return self._copy_ns(nbytes, Track.TO_DEVICE)

    def first_point_at(self, time_ns: int) -> int:
        """The first point that is reached at `time_ns` or later, or the number of points if there is none."""
        return bisect_left(self.reached_ns, time_ns)

    def last_point_by(self, time_ns: int) -> int:
        """The last point that is reached by `time_ns`, or -1 if there is none."""
        return bisect_right(self.reached_ns, time_ns) - 1

    def _copy_ns(self, nbytes: int, track: Track) -> int:
        return self._costs.latency_ns + math.ceil(nbytes / self._costs.rate(track) * 1e9)
