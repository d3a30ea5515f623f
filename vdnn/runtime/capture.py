"""CUDA graphs: what moves cannot be part of one."""

from __future__ import annotations

import torch

from vdnn.errors import VdnnError


def refuse_capture() -> None:
    """A copy to the host cannot be part of a CUDA graph: each replay would read and write the addresses of this step.
    Asked only of what would move: what is kept may be captured."""
    if torch.cuda.is_current_stream_capturing():
        raise VdnnError(
            "a CUDA graph is being captured inside vdnn.offload, and what is offloaded cannot be part of it: capture "
            "outside of the session, or under vdnn.paused()."
        )
