"""A callback for Lightning's Trainer, which fits inside a session.

Trainer(..., callbacks=[LightningOffloadCallback(budget="12GiB")]).fit(module)
"""

from __future__ import annotations

from typing import Any

from vdnn.errors import CombinationError, LibraryMissingError, VdnnError
from vdnn.integrations.offload_arguments import OffloadArguments
from vdnn.integrations.training_run import TrainingRun
from vdnn.runtime.session.session import Session

try:
    from lightning.pytorch import Callback
except ModuleNotFoundError as error:
    if error.name not in ("lightning", "lightning.pytorch"):
        raise
    raise LibraryMissingError(what="vdnn.integrations.lightning", library="lightning", extra="lightning") from None

# Compared by class name, since importing a strategy imports its library.
_REFUSED = ("DeepSpeedStrategy", "XLAStrategy", "SingleDeviceXLAStrategy", "XLAFSDPStrategy")


def __getattr__(name: str) -> object:
    if name == "OffloadCallback":
        raise VdnnError("vdnn.integrations.lightning.OffloadCallback is now called LightningOffloadCallback.")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class LightningOffloadCallback(Callback):  # type: ignore[misc, unused-ignore]  # untyped where it is not installed
    """Takes OffloadArguments or the options of vdnn.offload, and `offload_optimizer=True` to keep the state of the
    module's optimizers on the host. Raises at the start of fit() if something cannot work."""

    def __init__(self, arguments: OffloadArguments | None = None, **options: Any) -> None:
        self._run = TrainingRun(arguments, options)
        self._steps = 0

    @property
    def session(self) -> Session | None:
        """The session of the current run, or of the last one. None before the first."""
        return self._run.session

    @property
    def report(self) -> str:
        """The text of Session.report() for the last run."""
        return self._run.report

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Runs before fit()'s sanity evaluation. Refuses strategies and models that cannot work."""
        if stage != "fit":
            return
        name = type(trainer.strategy).__name__
        if name in _REFUSED:
            raise CombinationError(
                ours="vdnn's LightningOffloadCallback",
                theirs=f"Lightning's {name}",
                reason="it has never been tested inside a session",
                way_out="Use the strategy 'ddp', ModelParallelStrategy (FSDP2), or one device",
            )
        self._run.look_into(pl_module)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._run.begin(pl_module.device, trainer.optimizers, pl_module)
        self._steps = trainer.global_step

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step != self._steps:  # unchanged while gradients accumulate
            self._steps = trainer.global_step
            self._run.step()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._run.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._run.end()
