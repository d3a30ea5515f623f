"""Names the CUDA allocator of torch if it lacks the count of memory that budgets and plans are made of.

Only torch's native allocator counts requested bytes. "cudaMallocAsync" reports what the driver's pool uses, without a
total of allocations, and a pluggable allocator refuses to report anything.
"""

from __future__ import annotations

import torch


def allocator_without_count() -> str | None:
    """The name of torch's CUDA allocator if it does not count requested bytes, else None."""
    name = torch.cuda.get_allocator_backend()
    return None if name == "native" else name
