"""HostFigures: the times in which a host issues the operations of a step, from a hardware profile."""

from __future__ import annotations

from dataclasses import dataclass

from vdnn.errors import InvalidArgumentError
from vdnn.hardware.hardware_profile import HardwareProfile


@dataclass(frozen=True, slots=True)
class HostFigures:
    """Nanoseconds of the thread that trains. `operation_ns`: for each operation of torch, views included, from the
    program's line to torch's kernel; `launch_ns`: in addition for each operation that runs on the device. The others
    are what a session adds: `save_ns` for a save and its use that stay on the device, `copy_ns` for each copy, and
    `recompute_ns` for each recompute besides its operations."""

    operation_ns: int
    launch_ns: int
    save_ns: int
    copy_ns: int
    recompute_ns: int

    @staticmethod
    def of(profile: HardwareProfile, speed: float = 1.0) -> HostFigures | None:
        """Those of the profile, for a host that is `speed` times as fast. None if the profile has none."""
        if not 0 < speed < float("inf"):
            raise InvalidArgumentError(argument="host_speed", expected="a number above zero", got=repr(speed))
        if not profile.issue_ns:
            return None
        return HostFigures(**{f"{name}_ns": round(value / speed) for name, value in profile.issue_ns.items()})
