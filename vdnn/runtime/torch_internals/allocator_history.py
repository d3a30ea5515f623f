"""The history of torch's CUDA allocator: each allocation and each free, in order, in the bytes that were asked for.

torch records one history for the process, which the user may be recording for a memory snapshot. So a caller starts it
only if it is off, and stops only what it has started. Frees count when the memory returns to the allocator.
"""

from __future__ import annotations

from typing import Any

import torch

_SIGNS = {"alloc": 1, "free_completed": -1}


def is_recorded() -> bool:
    return bool(torch._C._cuda_isHistoryEnabled())


def start(most_events: int) -> None:
    """Records from now on, without stack traces. Beyond `most_events`, the oldest are lost."""
    torch.cuda.memory._record_memory_history(
        "all", context=None, stacks="python", max_entries=most_events, clear_history=True
    )


def stop() -> None:
    torch.cuda.memory._record_memory_history(None)


def changes(device: torch.device) -> list[int]:
    """The bytes of each allocation, and the negative bytes of each free, since the start."""
    snapshot: dict[str, Any] = torch.cuda.memory._snapshot()
    trace = snapshot["device_traces"][device.index or 0]
    return [_SIGNS[event["action"]] * int(event["size"]) for event in trace if event["action"] in _SIGNS]
