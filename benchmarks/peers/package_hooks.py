"""Peers whose hooks come from another package. They run if it is installed, on a GPU.

TRL's and torchtune's hooks both skip tensors on the CPU, so without a GPU they do nothing.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

from benchmarks.harness.places import CudaPlace, Place
from benchmarks.peers.peer import Opened, Peer, Trial, import_refusal


class PackageHooks(Peer):
    """`module.OffloadActivations` of a package with its default settings, as its trainers use it."""

    def __init__(self, name: str, package: str, module: str) -> None:
        self.name = name
        self.package = package
        self._module = module

    def refusal(self, place: Place, blocks: tuple[str, ...]) -> str | None:
        try:
            importlib.import_module(self._module)
        except Exception as error:  # another package may raise anything when it is imported
            return import_refusal(self._module, error)
        if not isinstance(place, CudaPlace):
            return "it offloads no tensors that are on the CPU"
        return None

    @contextlib.contextmanager
    def open(self, trial: Trial) -> Iterator[Opened]:
        module: Any = importlib.import_module(self._module)
        hooks = module.OffloadActivations()

        def forward(*inputs: Any) -> Any:
            # Their trainers enter the hooks around each forward pass: the exit ends the step's bookkeeping.
            with hooks:
                return trial.workload.model(*inputs)

        yield Opened(model=forward)


TRL = PackageHooks("trl", "trl", "trl.models.activation_offloading")
# torchtune is no longer maintained.
TORCHTUNE = PackageHooks("torchtune", "torchtune", "torchtune.training")
