"""For Lightning's Trainer: a callback that fits in a session.

Trainer(..., callbacks=[OffloadCallback(budget="12GiB")]).fit(module)
"""

from __future__ import annotations

from typing import Any

from vdnn.errors import CombinationError, LibraryMissingError
from vdnn.integrations.offload_arguments import OffloadArguments
from vdnn.integrations.training_run import TrainingRun
from vdnn.runtime.session.session import Session

try:
    from lightning.pytorch import Callback
except ModuleNotFoundError as error:
    if error.name not in ("lightning", "lightning.pytorch"):
        raise
    raise LibraryMissingError(
        integration="vdnn.integrations.lightning", library="lightning", extra="lightning"
    ) from None

# Told by the name of their classes, since importing them imports what they need.
_REFUSED = ("DeepSpeedStrategy", "XLAStrategy", "SingleDeviceXLAStrategy", "XLAFSDPStrategy")


class OffloadCallback(Callback):  # type: ignore[misc]
    """Takes OffloadArguments, or the options of vdnn.offload. What cannot work is refused when fitting begins."""

    def __init__(self, arguments: OffloadArguments | None = None, **options: Any) -> None:
        self._run = TrainingRun(arguments, options)
        self._steps = 0

    @property
    def session(self) -> Session | None:
        """Of the present run, or of the last one; None before the first."""
        return self._run.session

    @property
    def report(self) -> str:
        """Of the last run."""
        return self._run.report

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Before anything of it has run, an evaluation included."""
        if stage != "fit":
            return
        name = type(trainer.strategy).__name__
        if name in _REFUSED:
            raise CombinationError(
                ours="vdnn's OffloadCallback",
                theirs=f"Lightning's {name}",
                reason="it has never been tested inside a session",
                way_out="Use the strategy 'ddp', ModelParallelStrategy (FSDP2), or one device",
            )
        self._run.look_into(pl_module)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._run.begin(pl_module.device)
        self._steps = trainer.global_step

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step != self._steps:  # else gradients are accumulated
            self._steps = trainer.global_step
            self._run.step()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._run.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._run.end()
