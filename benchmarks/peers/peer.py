"""Peer: one way of running a training step, and Trial, which describes the step to it.

`open` is a context manager around whole steps, including the backward pass. It may yield a session of vdnn, another
callable in place of the model, or figures that only the peer knows.
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
    """The step that a peer runs. `budget` is the argument for vdnn.offload: bytes, "min", or None."""

    place: Place
    workload: Workload
    blocks: tuple[str, ...]
    budget: int | str | None = None

    @property
    def machine(self) -> vdnn.VirtualMachine | None:
        """The virtual machine of the place, or None on a GPU."""
        return self.place.machine if isinstance(self.place, MachinePlace) else None


@dataclass(slots=True)
class Moved:
    """Bytes and stalls that a peer counts itself, over all steps."""

    to_host_bytes: int = 0
    to_device_bytes: int = 0
    stall_ns: int = 0
    held_bytes: int = 0  # on the host at this time
    peak_held_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Opened:
    """An open peer. With `model` None the workload's own model runs. `said` is a remark on the figures."""

    session: vdnn.Session | None = None
    model: Callable[..., Any] | None = None
    moved: Moved | None = None
    said: str = ""


class Peer(ABC):
    """One way of training.

    `settling_steps` run before any step counts, while libraries load, memory is pinned and a plan is made. On a virtual
    machine fewer are needed, because its times do not vary. `cell_name` is the name in results: the compiled plain is
    "plain", too.
    """

    name: str
    settling_steps = 1
    virtual_settling_steps = 0
    has_budget = False
    compiled = False
    package: str | None = None  # its version is part of the result

    @property
    def cell_name(self) -> str:
        return self.name

    def refusal(self, place: Place, blocks: tuple[str, ...]) -> str | None:
        """The reason why the peer cannot run at `place`, or None if it can."""
        return None

    @abstractmethod
    def open(self, trial: Trial) -> AbstractContextManager[Opened]: ...


class CannotRun(Exception):
    """The peer has nothing to do in this workload. The cell is recorded as not run, with the reason."""


def import_refusal(package: str, error: Exception) -> str:
    first_line = (str(error).strip().splitlines() or [""])[0].rstrip(".")
    return f"{package} cannot be imported: {type(error).__name__}: {first_line}"
