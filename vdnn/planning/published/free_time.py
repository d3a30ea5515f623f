"""The free time of a gap: how long a storage can be absent at no cost. AutoSwap calls it the duration of absence.

It is the time from the end of the copy to the host to the latest start of the reload, each alone on the link. It is
negative if there is not enough time for both.
"""

from __future__ import annotations

from vdnn.planning.gaps import Gap
from vdnn.planning.policies.step_clock import StepClock


def free_ns(clock: StepClock, gap: Gap) -> int:
    """Later gaps of a storage need no second copy to the host. A storage that is not used again needs no reload."""
    copy_ns = clock.to_host_ns(gap.nbytes) if gap.number == 0 else 0
    absent_from_ns = max(clock.reached_ns[gap.release_point] + copy_ns, clock.reached_ns[gap.first - 1])
    reload_ns = 0 if gap.use is None else clock.to_device_ns(gap.nbytes)
    return clock.reached_ns[gap.last] - reload_ns - absent_from_ns
