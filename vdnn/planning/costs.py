"""What moving bytes costs: a link each way, as a card has it or as a step has measured it.

What computing costs is in the recording itself: on a machine that is not there from a roofline, on a GPU from events.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vdnn.errors import VdnnError
from vdnn.hardware import HardwareProfile
from vdnn.step.timeline import Copy, Timeline, Track


@dataclass(frozen=True, slots=True)
class LinkCosts:
    """`duplex_bytes_per_s` is the sum of both ways while both are busy. Each copy has its latency."""

    to_host_bytes_per_s: float
    to_device_bytes_per_s: float
    duplex_bytes_per_s: float
    latency_ns: int

    def __post_init__(self) -> None:
        fastest = max(self.to_host_bytes_per_s, self.to_device_bytes_per_s)
        if not min(self.to_host_bytes_per_s, self.to_device_bytes_per_s) > 0 or self.duplex_bytes_per_s < fastest:
            raise VdnnError(f"costs: rates are above zero and both ways together no slower than one alone, got {self}.")
        if self.latency_ns < 0:
            raise VdnnError(f"costs: a latency is 0 ns or more, got {self.latency_ns}.")

    def rate(self, track: Track) -> float:
        return self.to_host_bytes_per_s if track is Track.TO_HOST else self.to_device_bytes_per_s


def profile_costs(profile: HardwareProfile) -> LinkCosts:
    return LinkCosts(
        profile.to_host_bytes_per_s,
        profile.to_device_bytes_per_s,
        profile.duplex_bytes_per_s,
        profile.link_latency_ns,
    )


def measured_costs(timeline: Timeline, otherwise: LinkCosts) -> LinkCosts:
    """By the copies of a step that was run, as far as it has any of a size that tells; else as `otherwise` says.

    Of each way the total rate counts, copies that shared the link with the other way included: what a step gets.
    """
    rates = {track: _rate_of(timeline.copies, track) or otherwise.rate(track) for track in Track}
    both = sum(rates.values())
    share = otherwise.duplex_bytes_per_s / (otherwise.to_host_bytes_per_s + otherwise.to_device_bytes_per_s)
    duplex = max(*rates.values(), share * both)
    return LinkCosts(rates[Track.TO_HOST], rates[Track.TO_DEVICE], duplex, otherwise.latency_ns)


_LARGE_BYTES = 1 << 20  # below it latency is most of a copy


def _rate_of(copies: Sequence[Copy], track: Track) -> float | None:
    large = [copy for copy in copies if copy.track is track and copy.nbytes >= _LARGE_BYTES]
    busy_ns = sum(copy.end_ns - copy.begin_ns for copy in large)
    return None if busy_ns <= 0 else sum(copy.nbytes for copy in large) / busy_ns * 1e9
