"""One training run inside a session, for callbacks that are told when it begins and when it ends, or fails.

A trainer may raise without telling anybody: a run that was not ended is ended when the next one begins, by close(), and
when nobody holds it any more.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from vdnn.errors import CombinationError
from vdnn.integrations.offload_arguments import OffloadArguments
from vdnn.runtime.offload import offload
from vdnn.runtime.session import Session

logger = logging.getLogger("vdnn")


class TrainingRun:
    """Makes a session for each run. Begins and ends on the thread that trains."""

    def __init__(self, arguments: OffloadArguments | None, options: dict[str, Any]) -> None:
        if arguments is not None and options:
            raise TypeError("OffloadCallback: expected OffloadArguments or options of vdnn.offload, got both.")
        self._make: Callable[[], Session] = (lambda: offload(**options)) if arguments is None else arguments.session
        self._make().close()  # a wrong option is refused here, and not when training begins
        self._device = options.get("device") if arguments is None else arguments.vdnn_device
        self._entered: Session | None = None
        self.session: Session | None = None  # of this run, or of the last one
        self.report = ""  # of the last one

    def begin(self, device: torch.device) -> None:
        """`device` is the model's."""
        self.end()
        if device.type != "cuda" and self._device in (None, "cuda"):
            raise CombinationError(
                ours="vdnn.offload",
                theirs=f"a model on {device}",
                reason="what is saved there is nowhere to be moved from",
                way_out="Train on a GPU, or pass device='sim' to try vdnn on the CPU",
            )
        session = self._make()
        session.__enter__()
        self._entered = self.session = session

    def end(self) -> None:
        session, self._entered = self._entered, None
        if session is None:
            return
        session.__exit__(None, None, None)
        self.report = session.report()
        session.close()
        logger.info("%s", self.report)

    def __del__(self) -> None:
        if getattr(self, "_entered", None) is not None:
            self.end()


def warn_of_whole_compile() -> None:
    logger.warning(
        "vdnn: a model that is compiled as a whole needs all that it saved back at once, so that its peak stays. "
        "Compile its layers instead: `for layer in model.layers: layer.compile()`."
    )
