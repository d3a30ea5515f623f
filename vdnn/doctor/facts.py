"""The doctor's findings: one frozen dataclass for each subject, and one Report of all.

A subject that could not be read has a `problem`, a sentence that says why. A fact is None if it does not exist. These
classes are the JSON form, field for field. FORMAT_VERSION increases when a field is removed or changes its meaning, but
not when one is added.
"""

from __future__ import annotations

from dataclasses import dataclass

from vdnn.hardware import HostFigures, LinkFigures
from vdnn.hardware.measured_host import MeasuredHost

FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True)
class ExtensionFacts:
    """The native core, vdnn._C."""

    present: bool
    path: str | None
    problem: str | None


@dataclass(frozen=True, slots=True)
class DriverFacts:
    """The CUDA driver library. `version` is the newest CUDA it supports, such as "13.0"."""

    library: str
    loaded: bool
    version: str | None
    device_count: int
    problem: str | None


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """One GPU. `link` is None if it could not be measured; `problem` then says why."""

    ordinal: int
    name: str | None
    total_bytes: int | None
    compute_capability: str | None
    pci_bus_id: str | None
    numa_node: int | None
    integrated: bool | None
    link: LinkFigures | None
    problem: str | None


@dataclass(frozen=True, slots=True)
class CodecFacts:
    """One kernel of the codecs. `available`: this build has device code for it; if not, `reason` says why."""

    kernel: str
    available: bool
    reason: str | None


@dataclass(frozen=True, slots=True)
class HostFacts:
    """The host's memory. A limit that is None does not exist. All fields are None if `problem` is set."""

    total_bytes: int | None
    available_bytes: int | None
    cgroup_limit_bytes: int | None
    cgroup_used_bytes: int | None
    memlock_limit_bytes: int | None
    numa_nodes: int | None
    huge_page_bytes: int | None
    huge_pages_free: int | None
    transparent_huge_pages: str | None
    problem: str | None


@dataclass(frozen=True, slots=True)
class IssueFacts:
    """The time of the host to issue a step, measured here and of a profile. `measured` is None if it could not be
    measured; `problem` then says why. Its `launch_ns` is None without a GPU."""

    measured: MeasuredHost | None
    profile: str | None
    of_profile: HostFigures | None
    problem: str | None


@dataclass(frozen=True, slots=True)
class TorchFacts:
    """The torch that an import gives. `usable`: the runtime accepts its version."""

    version: str | None
    needed: str
    usable: bool
    problem: str | None


@dataclass(frozen=True, slots=True)
class Report:
    """The findings of one examination. `meanings` has one sentence for each missing thing."""

    vdnn_version: str
    python_version: str
    platform: str
    extension: ExtensionFacts
    driver: DriverFacts
    gpus: tuple[GpuFacts, ...]
    codecs: tuple[CodecFacts, ...]
    host: HostFacts
    torch: TorchFacts
    issue: IssueFacts
    meanings: tuple[str, ...]
