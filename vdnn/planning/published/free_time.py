"""How long a storage could be away and cost nothing: Capuchin's free time, AutoSwap's duration of absence.

From when its copy out would be done to when its copy back would have to begin, each alone on the link. If there is not
enough time for both, it is negative.
"""

from __future__ import annotations

from vdnn.planning.gaps import Gap
from vdnn.planning.policies.step_clock import StepClock


def free_ns(clock: StepClock, gap: Gap) -> int:
    """What was on the host before needs no other copy out, and what is not used again none back."""
    out_ns = clock.to_host_ns(gap.nbytes) if gap.number == 0 else 0
    gone_ns = max(clock.reached_ns[gap.release_point] + out_ns, clock.reached_ns[gap.first - 1])
    back_ns = 0 if gap.use is None else clock.to_device_ns(gap.nbytes)
    return clock.reached_ns[gap.last] - back_ns - gone_ns
