"""Peer: one way of running a training step, and what it is told of the trial.

`open` is a context manager around whole steps, backward included. It may yield a session of vdnn's, another callable
for the model, or figures that only it knows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import vdnn
from benchmarks.harness.places import MachinePlace, Place
from benchmarks.models.workload import Workload


@dataclass(frozen=True, slots=True)
class Trial:
    """`budget` is what vdnn.offload is told: bytes, "min", or None."""

    place: Place
    workload: Workload
    blocks: tuple[str, ...]
    budget: int | str | None = None

    @property
    def machine(self) -> vdnn.VirtualMachine | None:
        """None on a GPU."""
        return self.place.machine if isinstance(self.place, MachinePlace) else None


@dataclass(slots=True)
class Moved:
    """What a peer counts itself, all steps together."""

    to_host_bytes: int = 0
    to_device_bytes: int = 0
    stall_ns: int = 0
    held_bytes: int = 0  # on the host, now
    peak_held_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Opened:
    """`model` None: the workload's own. `said` is what a reader of the figures has to know."""

    session: vdnn.Session | None = None
    model: Callable[..., Any] | None = None
    moved: Moved | None = None
    said: str = ""


class Peer(ABC):
    """`settling_steps` run before any counts: libraries load, memory is pinned, a plan is made. On a machine that
    computes its times a step without a plan is like any other, so fewer do. `cell_name` is what results call it: the
    compiled plain is "plain", too."""

    name: str
    settling_steps = 1
    virtual_settling_steps = 0
    has_budget = False
    compiled = False
    package: str | None = None  # whose version belongs to the result

    @property
    def cell_name(self) -> str:
        return self.name

    def refusal(self, place: Place, blocks: tuple[str, ...]) -> str | None:
        """Why it cannot run there; None if it can."""
        return None

    @abstractmethod
    def open(self, trial: Trial) -> AbstractContextManager[Opened]: ...


class CannotRun(Exception):
    """This workload gives the peer nothing to do: the cell is recorded as not run, with the reason."""


def import_refusal(package: str, error: Exception) -> str:
    first_line = (str(error).strip().splitlines() or [""])[0].rstrip(".")
    return f"{package} cannot be imported: {type(error).__name__}: {first_line}"
