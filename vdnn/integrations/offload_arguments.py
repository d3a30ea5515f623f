"""The options of vdnn.offload as a dataclass like TrainingArguments, for command lines and configuration files.

parser = HfArgumentParser((TrainingArguments, OffloadArguments))
training, offloading = parser.parse_args_into_dataclasses()      # --vdnn_budget 12GiB
Trainer(..., callbacks=[OffloadCallback(offloading)])
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Optional

from vdnn.runtime.session.limits import LIMITS, Limits
from vdnn.step.plan import Plan

_PREFIX = "vdnn_"


@dataclass(frozen=True)
class OffloadArguments:
    """Each field is the option of vdnn.offload or of vdnn.Limits of that name, as text or a number, but
    `vdnn_offload_optimizer`: it stands for `optimizer=`, which a command line cannot name. The class has no slots,
    since parsers of configuration files look for defaults on the class."""

    # Optional[...], not `| None`: argument parsers read these annotations.
    vdnn_policy: str = field(default="auto", metadata={"help": "name of a policy"})
    vdnn_budget: Optional[str] = field(  # noqa: UP045
        default=None, metadata={"help": "device memory a step may take: 12GiB, 80%, min; default: what the device has"}
    )
    vdnn_plan: Optional[str] = field(  # noqa: UP045
        default=None, metadata={"help": "file of a plan to follow, instead of a policy and a budget"}
    )
    vdnn_plans: Optional[str] = field(  # noqa: UP045
        default=None, metadata={"help": "folder in which plans outlive the process, for the next run of this training"}
    )
    vdnn_device: Optional[str] = field(  # noqa: UP045
        default=None, metadata={"help": "cuda; sim to try it on the CPU; default: the GPU that the tensors are on"}
    )
    vdnn_recompute: bool = field(default=True, metadata={"help": "a plan may recompute instead of moving"})
    vdnn_lossy: Optional[str] = field(  # noqa: UP045
        default=None, metadata={"help": "lossy codec that a plan may use as well: bf16 or fp8"}
    )
    vdnn_tolerance: Optional[float] = field(  # noqa: UP045
        default=None, metadata={"help": "relative error up to which a recompute may differ; default: none"}
    )
    vdnn_recheck: int = field(
        default=64, metadata={"help": "one step in this many compares what is recomputed; 0 never"}
    )
    vdnn_integrity: bool = field(default=False, metadata={"help": "compare what is reloaded with what was offloaded"})
    vdnn_measure: bool = field(default=False, metadata={"help": "record a step and measure each step"})
    vdnn_warmup_steps: int = field(default=1, metadata={"help": "steps before the one that is recorded"})
    vdnn_min_bytes: str = field(default="1MiB", metadata={"help": "smaller storages stay on the device"})
    vdnn_host_budget: Optional[str] = field(  # noqa: UP045
        default=None, metadata={"help": "limit of pinned host memory; default: this rank's share"}
    )
    vdnn_offload_optimizer: bool = field(
        default=False, metadata={"help": "the state of the trainer's optimizers lives on the host between steps"}
    )
    vdnn_optimizer_on: str = field(
        default="device", metadata={"help": "where an offloaded optimizer steps: device, or cpu, with other last bits"}
    )
    vdnn_optimizer_step: str = field(
        default="immediate",
        metadata={"help": "when an offloaded optimizer steps: immediate, or deferred to the next forward pass"},
    )
    vdnn_gradients: Optional[bool] = field(  # noqa: UP045
        default=None,
        metadata={
            "help": "gradients of an offloaded optimizer live on the host until they are read; default: where the "
            "budget needs it"
        },
    )
    vdnn_parameters: Optional[str] = field(  # noqa: UP045
        default=None,
        metadata={"help": "frozen: they live on the host between their uses; all: those an offloaded optimizer trains"},
    )
    vdnn_offload_window: Optional[str] = field(  # noqa: UP045
        default=None,
        metadata={"help": "limit of copies to the host in flight; default: 256MiB or an eighth of the budget"},
    )
    vdnn_reload_window: Optional[str] = field(  # noqa: UP045
        default=None, metadata={"help": "limit of what is reloaded ahead of its use; the same default"}
    )

    def options(self) -> dict[str, Any]:
        """The keyword arguments of vdnn.offload but the optimizer, with the plan loaded from its file and the limits
        grouped."""
        options = {name.removeprefix(_PREFIX): _read(value) for name, value in dataclasses.asdict(self).items()}
        del options["offload_optimizer"]
        options["plans"] = self.vdnn_plans  # the name of a folder may be a number
        if options["plan"] is not None:
            options["plan"] = Plan.load(options["plan"])
        limits = Limits(**{name: options.pop(name) for name in LIMITS})
        return {**options, "limits": limits}

    @classmethod
    def from_options(cls, **options: Any) -> OffloadArguments:
        """Takes the options without their prefix. Raises TypeError for others."""
        known = [option.name.removeprefix(_PREFIX) for option in dataclasses.fields(cls)]
        unknown = sorted(set(options) - set(known))
        if unknown:
            raise TypeError(f"OffloadArguments: expected {', '.join(known)}, got {', '.join(unknown)}.")
        return cls(**{f"{_PREFIX}{name}": value for name, value in options.items()})


def _read(value: Any) -> Any:
    """A command line passes "0" where a program passes 0."""
    return int(value) if isinstance(value, str) and value.isdecimal() else value
