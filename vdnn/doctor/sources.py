"""The doctor's sources: the native core, torch, and the link, as functions of one value.

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

    native_core: Callable[[], ModuleType] = _native_core
    torch_version: Callable[[], str] = torch_version
    link: Callable[[Device], LinkFigures] = _link
    library: str = "libcuda.so.1"
