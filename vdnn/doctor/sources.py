"""The doctor's sources: the native core, torch, and the link, as functions of one value.

The doctor imports nothing that may be missing except through these functions. Tests pass other sources.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, cast

from vdnn.hardware import LinkFigures
from vdnn.requirements import torch_version


class DeviceInfo(Protocol):
    """The properties of a device."""

    @property
    def name(self) -> str: ...
    @property
    def total_bytes(self) -> int: ...
    @property
    def compute_capability(self) -> int: ...
    @property
    def pci_bus_id(self) -> str: ...
    @property
    def numa_node(self) -> int: ...
    @property
    def integrated(self) -> bool: ...


class NativeDevice(Protocol):
    """The part of an open device that the doctor uses."""

    @property
    def info(self) -> DeviceInfo: ...
    def close(self) -> None: ...


class HostLimits(Protocol):
    """The host memory and limits that the native core reads. A limit that is None does not exist."""

    @property
    def total_bytes(self) -> int: ...
    @property
    def available_bytes(self) -> int: ...
    @property
    def cgroup_limit_bytes(self) -> int | None: ...
    @property
    def cgroup_used_bytes(self) -> int | None: ...
    @property
    def memlock_limit_bytes(self) -> int | None: ...
    @property
    def numa_nodes(self) -> int: ...
    @property
    def huge_page_bytes(self) -> int: ...
    @property
    def huge_pages_free(self) -> int: ...
    @property
    def transparent_huge_pages(self) -> str: ...


class NativeCore(Protocol):
    """The part of vdnn._C that the doctor calls."""

    __file__: str | None
    Kernel: type[Enum]

    def CudaDevice(self, ordinal: int, library: str) -> NativeDevice: ...  # noqa: N802 (a class over there)
    def driver_status(self, library: str) -> Mapping[str, str | int | bool]: ...
    def host_limits(self) -> HostLimits: ...
    def device_code_missing_reason(self) -> str: ...


def _native_core() -> NativeCore:
    return cast(NativeCore, importlib.import_module("vdnn._C"))


def _link(device: NativeDevice) -> LinkFigures:
    # Imported late because the probe imports the native core, and the doctor must start without it.
    measure_link: Callable[..., LinkFigures] = importlib.import_module("vdnn.hardware.link_probe").measure_link
    try:
        return measure_link(device, progress=_show_progress)
    finally:
        if sys.stderr.isatty():
            sys.stderr.write("\r\x1b[K")


def _show_progress(phase: str) -> None:
    """Writes progress to stderr if it is a terminal."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[Kmeasuring the link: {phase} ...")
        sys.stderr.flush()


@dataclass(frozen=True, slots=True)
class Sources:
    """The functions that the doctor reads facts with. Each may raise."""

    native_core: Callable[[], NativeCore] = _native_core
    torch_version: Callable[[], str] = torch_version
    link: Callable[[NativeDevice], LinkFigures] = _link
    library: str = "libcuda.so.1"
