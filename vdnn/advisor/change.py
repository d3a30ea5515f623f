"""Change: the differences of a rehearsal from the program. Change() is the unchanged step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Change:
    """`autocast` is the name of a dtype. `batch` is the batch of one step, divided into `micro_batches`.
    `offload_bytes` is the budget of a vdnn.offload around the steps. `without_biases` names parameters."""

    autocast: str | None = None
    tf32: bool = False
    fused: bool = False
    set_to_none: bool = False
    checkpointed: bool = False
    channels_last: bool = False
    without_biases: tuple[str, ...] = ()
    loss_chunk_rows: int = 0
    micro_batches: int = 1
    batch: int | None = None
    offload_bytes: int | None = None
