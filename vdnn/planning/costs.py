"""The cost of copies: the rates of the link in both directions, from a hardware profile or measured in a step.

The cost of computing is part of the recording: from a roofline on a virtual machine, from events on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from vdnn.errors import InvalidArgumentError
from vdnn.hardware import HardwareProfile, HostFigures
from vdnn.step.timeline import Copy, Timeline, Track


@dataclass(frozen=True, slots=True)
class LinkCosts:
    """Rates of the link. `duplex_bytes_per_s` is the sum of both directions while both are busy. Each copy adds
    `latency_ns`. The host needs `issue_ns` to issue a copy, and 0 if nothing is known of it."""

    to_host_bytes_per_s: float
    to_device_bytes_per_s: float
    duplex_bytes_per_s: float
    latency_ns: int
    issue_ns: int = 0

    def __post_init__(self) -> None:
        fastest = max(self.to_host_bytes_per_s, self.to_device_bytes_per_s)
        if not min(self.to_host_bytes_per_s, self.to_device_bytes_per_s) > 0 or self.duplex_bytes_per_s < fastest:
            raise InvalidArgumentError(
                argument="costs",
                expected="rates above zero, and a duplex rate of at least the faster direction's rate",
                got=str(self),
            )
        if self.latency_ns < 0:
            raise InvalidArgumentError(argument="costs", expected="a latency of 0 ns or more", got=str(self.latency_ns))
        if self.issue_ns < 0:
            raise InvalidArgumentError(
                argument="costs", expected="a copy that the host issues in 0 ns or more", got=str(self.issue_ns)
            )

    def slowed(self, factor: float) -> LinkCosts:
        """The same link with rates that are lower by this factor."""
        return replace(
            self,
            to_host_bytes_per_s=self.to_host_bytes_per_s / factor,
            to_device_bytes_per_s=self.to_device_bytes_per_s / factor,
            duplex_bytes_per_s=self.duplex_bytes_per_s / factor,
        )

    def without_host(self) -> LinkCosts:
        """The same link on a host that takes no time."""
        return replace(self, issue_ns=0)

    def rate(self, track: Track) -> float:
        return self.to_host_bytes_per_s if track is Track.TO_HOST else self.to_device_bytes_per_s


def profile_costs(profile: HardwareProfile, host: HostFigures | None = None) -> LinkCosts:
    return LinkCosts(
        profile.to_host_bytes_per_s,
        profile.to_device_bytes_per_s,
        profile.duplex_bytes_per_s,
        profile.link_latency_ns,
        0 if host is None else host.copy_ns,
    )


def measured_costs(timeline: Timeline, otherwise: LinkCosts) -> LinkCosts:
    """The rates that the copies of a step reached. A direction without large copies takes its rate from `otherwise`.

    A rate is the total of its direction, copies included that shared the link with the other direction.
    """
    rates = {track: _rate_of(timeline.copies, track) or otherwise.rate(track) for track in Track}
    both = sum(rates.values())
    share = otherwise.duplex_bytes_per_s / (otherwise.to_host_bytes_per_s + otherwise.to_device_bytes_per_s)
    duplex = max(*rates.values(), share * both)
    return LinkCosts(rates[Track.TO_HOST], rates[Track.TO_DEVICE], duplex, otherwise.latency_ns, otherwise.issue_ns)


_LARGE_BYTES = 1 << 20  # below this, latency dominates the time of a copy


def _rate_of(copies: Sequence[Copy], track: Track) -> float | None:
    large = [copy for copy in copies if copy.track is track and copy.nbytes >= _LARGE_BYTES]
    busy_ns = sum(copy.end_ns - copy.begin_ns for copy in large)
    return None if busy_ns <= 0 else sum(copy.nbytes for copy in large) / busy_ns * 1e9
