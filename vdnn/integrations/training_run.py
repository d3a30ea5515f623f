"""One training run inside a session, for the callbacks of trainers.

If several ranks train under a budget, they agree on their plans between two steps. A trainer may raise without calling
its callbacks. A run that was not ended is therefore ended when the next one begins, by close(), and when it is
garbage-collected.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from vdnn.errors import CombinationError
from vdnn.integrations.offload_arguments import OffloadArguments
from vdnn.integrations.ranks import TogetherSession, offload_together
from vdnn.runtime.session.offload import offload
from vdnn.runtime.session.session import Session
from vdnn.user_warnings import warn

logger = logging.getLogger("vdnn")
_OF_OPTIMIZER = ("optimizer_on", "optimizer_step", "gradients")


class TrainingRun:
    """Makes a session for each run. Begins and ends on the thread that trains."""

    def __init__(self, arguments: OffloadArguments | None, options: dict[str, Any]) -> None:
        if arguments is not None and options:
            raise TypeError("vdnn's callback: expected OffloadArguments or options of vdnn.offload, got both.")
        if arguments is not None:
            self._options, self._offloads_optimizer = arguments.options(), arguments.vdnn_offload_optimizer
        else:
            self._options, self._offloads_optimizer = options, options.pop("offload_optimizer", False)
        if not isinstance(self._offloads_optimizer, bool):
            raise TypeError(f"offload_optimizer: expected True or False, got {self._offloads_optimizer!r}.")
        # Options of the optimizer, which is not known yet.
        self._of_optimizer: dict[str, Any] = {
            name: self._options.pop(name) for name in _OF_OPTIMIZER if name in self._options
        }
        self._parameters = self._options.pop("parameters", None)  # of the model, which is not known yet either
        if self._parameters not in (None, "frozen", "all"):
            raise ValueError(f"parameters: expected 'frozen', 'all' or None, got {self._parameters!r}.")
        if not self._offloads_optimizer:
            if self._parameters == "all":
                raise ValueError("parameters: those of the optimizer, too. Give offload_optimizer=True as well.")
            if self._of_optimizer.get("optimizer_on", "device") != "device":
                raise ValueError(
                    "optimizer_on: it says where the optimizer steps. Give offload_optimizer=True as well."
                )
            if self._of_optimizer.get("optimizer_step", "immediate") != "immediate":
                raise ValueError(
                    "optimizer_step: it says when the optimizer steps. Give offload_optimizer=True as well."
                )
            if self._of_optimizer.get("gradients", False):
                raise ValueError("gradients: they are those of the optimizer. Give offload_optimizer=True as well.")
        offload(**self._options)  # raises for a wrong option now, not when training begins
        self._entered: Session | TogetherSession | None = None
        self._last: Session | None = None
        self.report = ""  # of the last run

    @property
    def session(self) -> Session | None:
        """The session of the current run, or of the last one. None before the first."""
        return self._last if self._entered is None else _session_of(self._entered)

    def look_into(self, model: torch.nn.Module) -> None:
        """Raises before training for a model that a session would refuse at its first call."""
        offload(**self._options).look_into(model)

    def begin(self, device: torch.device, optimizers: Sequence[Any], model: torch.nn.Module | None = None) -> None:
        """Begins a run of `model` on `device`, trained by `optimizers`. Ends the previous run if it was not ended."""
        self.end()
        if device.type != "cuda" and self._options.get("device") in (None, "cuda"):
            raise CombinationError(
                ours="vdnn.offload",
                theirs=f"a model on {device}",
                reason="vdnn offloads from a GPU",
                way_out="Train on a GPU, or pass device='sim' to try vdnn on the CPU",
            )
        agrees, options = self._has_ranks_to_agree(), self._options
        make = offload_together if agrees else offload
        managed: dict[str, Any] = {}
        if self._offloads_optimizer:
            managed = {"optimizer": list(optimizers), **self._of_optimizer}
        if self._parameters is not None:
            managed |= {"model": model, "parameters": self._parameters}
        if agrees and options.get("plans") is not None:
            managed["model"] = model
        entered = make(**options, **managed)
        entered.__enter__()
        self._entered = entered

    def _has_ranks_to_agree(self) -> bool:
        """True if the ranks must agree on a plan: otherwise a rank that cannot meet its budget raises alone, and the
        others wait for it."""
        plans = self._options.get("budget") is not None and isinstance(self._options.get("policy", "auto"), str)
        has_ranks = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        return plans and has_ranks and not self._options.get("measure")

    def step(self) -> None:
        """Called after the optimizer's step, on all ranks."""
        if isinstance(self._entered, TogetherSession):
            self._entered.step()

    def end(self) -> None:
        entered, self._entered = self._entered, None
        if entered is None:
            return
        entered.__exit__(None, None, None)
        session = self._last = _session_of(entered)
        self.report = "\n  ".join((session.report(), *(entered.lines if isinstance(entered, TogetherSession) else ())))
        session.close()
        logger.info("%s", self.report)

    def __del__(self) -> None:
        if getattr(self, "_entered", None) is not None:
            self.end()


def _session_of(entered: Session | TogetherSession) -> Session:
    return entered.session if isinstance(entered, TogetherSession) else entered


def warn_of_whole_compile() -> None:
    warn(
        "a model that is compiled as a whole needs all of its saved tensors back at once, so its peak does not "
        "fall. Compile its layers instead: `for layer in model.layers: layer.compile()`."
    )
