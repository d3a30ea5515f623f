"""Peers whose hooks come from a package that is not among this one's: opened where it is installed, on a GPU.

Both TRL's and torchtune's skip tensors on the CPU, so off a GPU there is nothing to run.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

from benchmarks.harness.places import CudaPlace, Place
from benchmarks.peers.peer import Opened, Peer, Trial, import_refusal


class PackageHooks(Peer):
    """`module.OffloadActivations` of a package, as its trainers use it: with its own settings."""

    def __init__(self, name: str, package: str, module: str) -> None:
        self.name = name
        self.package = package
        self._module = module

    def refusal(self, place: Place, blocks: tuple[str, ...]) -> str | None:
        try:
            importlib.import_module(self._module)
        except Exception as error:  # what a foreign package raises when it is imported is not ours to know
            return import_refusal(self._module, error)
        if not isinstance(place, CudaPlace):
            return "it offloads no tensors that are on the CPU"
        return None

    @contextlib.contextmanager
    def open(self, trial: Trial) -> Iterator[Opened]:
        module: Any = importlib.import_module(self._module)
        hooks = module.OffloadActivations()

        def forward(*inputs: Any) -> Any:
            # Their trainers enter it around each forward pass: leaving it ends the step's bookkeeping.
            with hooks:
                return trial.workload.model(*inputs)

        yield Opened(model=forward)
