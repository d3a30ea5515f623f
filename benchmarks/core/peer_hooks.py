"""Opens the offloading hooks of other packages, if those are installed and can run.

Neither package is a dependency: TRL brings accelerate, datasets and pandas, torchtune needs torchao, and both need a
GPU's streams. For a peer that cannot be opened, the reason is returned.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Absent:
    """A peer that was not run."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: not run, {self.reason}."


def _open_trl() -> AbstractContextManager[object]:
    module: Any = importlib.import_module("trl.models.activation_offloading")
    hooks: AbstractContextManager[object] = module.OffloadActivations(min_offload_size=0)
    return hooks


def _open_torchtune() -> AbstractContextManager[object]:
    module: Any = importlib.import_module("torchtune.training")
    hooks: AbstractContextManager[object] = module.OffloadActivations(min_offload_size=0)
    return hooks


PEERS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "TRL's OffloadActivations": _open_trl,
    "torchtune's OffloadActivations": _open_torchtune,
}


def open_peers(device: torch.device) -> tuple[dict[str, AbstractContextManager[object]], list[Absent]]:
    """The hooks that offload tensors on `device`, by name, and the other peers with the reason."""
    opened: dict[str, AbstractContextManager[object]] = {}
    absent = []
    for name, open_peer in PEERS.items():
        try:
            hooks = open_peer()
        except Exception as error:  # another package may raise anything when it is opened
            absent.append(Absent(name, _reason(error)))
            continue
        if device.type == "cpu":
            absent.append(Absent(name, "it offloads no tensors that are on the CPU"))
            continue
        opened[name] = hooks
    return opened, absent


def _reason(error: Exception) -> str:
    first_line = str(error).strip().split("\n")[0].rstrip(".")
    said = f"{type(error).__name__}: {first_line}"
    if isinstance(error, ImportError) or torch.accelerator.is_available():
        return said
    return f"it needs a GPU ({said})"
