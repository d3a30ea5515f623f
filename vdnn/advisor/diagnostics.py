"""Debugging tools that cost time while they are on: which are on now, and how to turn each off."""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch

# For each tool, the line that turns it off.
TOOLS = {
    "autograd's anomaly detection": "torch.autograd.set_detect_anomaly(False)",
    "torch's profiler": "leave the `with torch.profiler.profile()` after a few steps, or give it a schedule",
    "emit_nvtx": "leave the `with torch.autograd.profiler.emit_nvtx()` out",
    "CUDA_LAUNCH_BLOCKING=1": "unset CUDA_LAUNCH_BLOCKING",
    "TORCH_DISTRIBUTED_DEBUG=DETAIL": "unset TORCH_DISTRIBUTED_DEBUG",
    "cudnn.deterministic": "torch.backends.cudnn.deterministic = False",
    "deterministic algorithms": "torch.use_deterministic_algorithms(False)",
}
_NVTX = "nvtx"


def tools_that_are_on() -> Iterator[str]:
    """The tools that are on in this thread. This has to be cheap: it runs at every operation of an observed step."""
    if torch.is_anomaly_enabled():
        yield "autograd's anomaly detection"
    if torch._C._autograd._profiler_enabled():
        kind = str(torch._C._autograd._profiler_type()).lower()
        yield "emit_nvtx" if _NVTX in kind else "torch's profiler"
    if os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"):
        yield "CUDA_LAUNCH_BLOCKING=1"
    if os.environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        yield "TORCH_DISTRIBUTED_DEBUG=DETAIL"
    if torch.backends.cudnn.deterministic:
        yield "cudnn.deterministic"
    if torch.are_deterministic_algorithms_enabled():
        yield "deterministic algorithms"
