"""The times of copies on two copy engines that share one link: the same arithmetic as the simulated device's clock.

Each engine does one copy at a time, in the order of issue. When copies run in both directions at once, the one that was
issued first keeps its rate, and the other gets the rest of the link's rate.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator

from vdnn.planning.costs import LinkCosts
from vdnn.step.timeline import Track

# A copy always keeps this part (1/16) of its own rate, even if the other direction takes the whole link.
_LEAST_SHARE = 16


class _Engine:
    def __init__(self, own_rate: float, other_rate: float, duplex_rate: float) -> None:
        self.alone = own_rate
        self.shared = min(max(duplex_rate - other_rate, own_rate / _LEAST_SHARE), own_rate)
        self.stream_ns = 0  # when the copy stream has finished its work
        self.free_ns = 0
        self.busy: deque[tuple[int, int]] = deque()


class LinkClock:
    """The link during one step. Both engines are idle when the step begins."""

    def __init__(self, costs: LinkCosts) -> None:
        out, back = costs.to_host_bytes_per_s, costs.to_device_bytes_per_s
        self._latency_ns = costs.latency_ns
        self._engines = {
            Track.TO_HOST: _Engine(out, back, costs.duplex_bytes_per_s),
            Track.TO_DEVICE: _Engine(back, out, costs.duplex_bytes_per_s),
        }

    def copy(self, track: Track, nbytes: int, ready_ns: int) -> tuple[int, int]:
        """Issues a copy that may begin at `ready_ns`. Returns when its stream reaches it, and when it is complete."""
        engine = self._engines[track]
        other = self._engines[Track.TO_DEVICE if track is Track.TO_HOST else Track.TO_HOST]
        reached_ns = max(engine.stream_ns, ready_ns)
        issue_ns = max(reached_ns, engine.free_ns)
        begin_ns = issue_ns + self._latency_ns
        end_ns = _end_of_copy(engine, other, begin_ns, nbytes)
        engine.busy.append((begin_ns, end_ns))
        engine.free_ns = engine.stream_ns = end_ns
        while other.busy and other.busy[0][1] <= issue_ns:
            other.busy.popleft()
        return reached_ns, end_ns


def _duration_ns(nbytes: float, rate: float) -> int:
    return math.ceil(nbytes / rate * 1e9)


def _end_of_copy(engine: _Engine, other: _Engine, begin_ns: int, nbytes: int) -> int:
    now, left = begin_ns, float(nbytes)
    for until, rate in _spans(engine, other, begin_ns):
        if left <= 0:
            break
        if until <= now:
            continue
        end = min(until, now + _duration_ns(left, rate))
        left = 0.0 if end < until else left - float(end - now) * rate / 1e9
        now = end
    return now + _duration_ns(left, engine.alone) if left > 0 else now


def _spans(engine: _Engine, other: _Engine, begin_ns: int) -> Iterator[tuple[int, float]]:
    """Times and the rate that holds up to each: alone before a copy of the other direction, shared during it."""
    for begin, end in other.busy:
        if end > begin_ns:
            yield begin, engine.alone
            yield end, engine.shared
