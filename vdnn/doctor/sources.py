"""The doctor's sources: the native core, torch, the link and the host, as functions of one value.

The doctor imports nothing that may be missing except through these functions. Tests pass other sources.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

from vdnn.hardware import LinkFigures
from vdnn.hardware.measured_host import MeasuredHost
from vdnn.requirements import torch_version

if TYPE_CHECKING:
    from vdnn._C import Device


def _native_core() -> ModuleType:
    return importlib.import_module("vdnn._C")


def _link(device: Device) -> LinkFigures:
    # Imported late because the probe imports the native core, and the doctor must start without it.
    measure_link: Callable[..., LinkFigures] = importlib.import_module("vdnn.hardware.link_probe").measure_link
    try:
        return measure_link(device, progress=_show_progress)
    finally:
        _say_progress("")


def _host() -> MeasuredHost:
    # Imported late because the probe imports torch and the native core.
    measure_host: Callable[[], MeasuredHost] = importlib.import_module(
        "vdnn.runtime.rehearsal.host_probe"
    ).measured_host
    _say_progress("measuring the host ...")
    try:
        return measure_host()
    finally:
        _say_progress("")


def _show_progress(phase: str) -> None:
    _say_progress(f"measuring the link: {phase} ...")


def _say_progress(doing: str) -> None:
    """Writes to stderr if it is a terminal."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{doing}")
        sys.stderr.flush()


@dataclass(frozen=True, slots=True)
class Sources:
    """The functions that the doctor reads facts with. Each may raise."""

    native_core: Callable[[], ModuleType] = _native_core
    torch_version: Callable[[], str] = torch_version
    link: Callable[[Device], LinkFigures] = _link
    host: Callable[[], MeasuredHost] = _host
    library: str = "libcuda.so.1"
