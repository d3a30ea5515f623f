"""CUDA graphs and compiled code: what hooks must not become a part of."""

from __future__ import annotations

from collections.abc import Callable

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


def keep_dynamo_out(hook: Callable[..., object]) -> None:
    """torch.compile would trace a hook that runs amid compiled code, and all that it calls: no part of the program."""
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(hook.__code__, frames._FrameExecStrategy(skip, skip))
