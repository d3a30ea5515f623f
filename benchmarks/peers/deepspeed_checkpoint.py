"""DeepSpeed's activation checkpointing with the inputs of blocks on the host (`checkpoint_in_cpu`), on a GPU.

Its checkpoint() is called around each block, as its documentation says for models that are not from Megatron.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

from benchmarks.harness.places import CudaPlace, Place
from benchmarks.peers.checkpoint import checkpointed
from benchmarks.peers.peer import Opened, Peer, Trial, import_refusal

_MODULE = "deepspeed.runtime.activation_checkpointing.checkpointing"


class DeepSpeedCheckpoint(Peer):
    """DeepSpeed's checkpointing of the same blocks as torch's."""

    name = "deepspeed-checkpoint"
    package = "deepspeed"

    def refusal(self, place: Place, blocks: tuple[str, ...]) -> str | None:
        try:
            importlib.import_module(_MODULE)
        except Exception as error:  # another package may raise anything when it is imported
            return import_refusal(_MODULE, error)
        return None if isinstance(place, CudaPlace) else "its copies need the streams of a GPU"

    @contextlib.contextmanager
    def open(self, trial: Trial) -> Iterator[Opened]:
        module: Any = importlib.import_module(_MODULE)
        module.configure(None, partition_activations=False, contiguous_checkpointing=False, checkpoint_in_cpu=True)
        with checkpointed(trial.workload.model, trial.blocks, module.checkpoint):
            yield Opened()


DEEPSPEED_CHECKPOINT = DeepSpeedCheckpoint()
