"""MeasuredHost: the time that this machine's host needs to issue a step, measured here, and the file that keeps it.

The file is in the user's cache folder, one for each machine. It is read again only with the same versions, processor
and GPU. A file that is damaged or cannot be written costs one sentence: the figures are measured again.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
from dataclasses import dataclass
from pathlib import Path

from vdnn.errors import FormatError, InvalidArgumentError
from vdnn.hardware.hardware_profile import HardwareProfile
from vdnn.hardware.host_figures import HostFigures
from vdnn.step.json_form import load_file, save_text, to_json

logger = logging.getLogger("vdnn")

_FORM, _VERSION = "vdnn measured host", 1


@dataclass(frozen=True, slots=True)
class MeasuredHost:
    """Nanoseconds of the thread that trains. `operation_ns`, `launch_ns`, `save_ns` and `recompute_ns` are those of
    HostFigures; `move_out_ns` and `fetch_ns` are those of a copy to the host and of one back, whose mean is its
    `copy_ns`; `event_ns` is that of one mark on a stream. `launch_ns` is None without a GPU."""

    machine: str
    operation_ns: int
    launch_ns: int | None
    save_ns: int
    move_out_ns: int
    fetch_ns: int
    recompute_ns: int
    event_ns: int

    def __post_init__(self) -> None:
        for name in ("operation_ns", "launch_ns", "save_ns", "move_out_ns", "fetch_ns", "recompute_ns", "event_ns"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise InvalidArgumentError(argument=name, expected="nanoseconds above zero", got=str(value))

    @property
    def copy_ns(self) -> int:
        return (self.move_out_ns + self.fetch_ns + 1) // 2

    def figures(self, profile: HardwareProfile) -> HostFigures:
        """The figures to plan with. A launch that was not measured is that of the profile's host, if it has one."""
        launch_ns = self.launch_ns if self.launch_ns is not None else profile.issue_ns.get("launch", 0)
        return HostFigures(self.operation_ns, launch_ns, self.save_ns, self.copy_ns, self.recompute_ns)


def machine_name(*versions: str) -> str:
    """Identifies this machine: its name, processor and cores, and the versions and GPU that the caller adds."""
    return ", ".join((platform.node(), _processor(), f"{os.cpu_count()} cores", *versions))


def kept_host(machine: str) -> MeasuredHost | None:
    """The figures that were kept for this machine. None if there are none; a damaged file is named in the log."""
    try:
        found = load_file(_path(machine), MeasuredHost, _FORM, _VERSION)
    except FileNotFoundError:
        return None
    except FormatError as error:
        logger.warning("vdnn: %s The host is measured again.", error)
        return None
    except (OSError, RuntimeError) as error:
        logger.warning("vdnn: the measured host cannot be read (%s). It is measured again.", error)
        return None
    return found if found.machine == machine else None


def keep_host(host: MeasuredHost) -> None:
    """Keeps the figures for later plans. If that is not possible, the log says so."""
    try:
        path = _path(host.machine)
        path.parent.mkdir(parents=True, exist_ok=True)
        save_text(to_json(host, _FORM, _VERSION), path)
    except (OSError, RuntimeError) as error:
        logger.warning("vdnn: the measured host cannot be kept (%s). Each plan measures it again.", error)


def _path(machine: str) -> Path:
    """Raises RuntimeError if the user has no home folder."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return folder / "vdnn" / f"host-{hashlib.sha256(machine.encode()).hexdigest()[:16]}.json"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
