"""The options of vdnn.offload as data, for command lines and configuration files, in the manner of TrainingArguments.

parser = HfArgumentParser((TrainingArguments, OffloadArguments))
training, offloading = parser.parse_args_into_dataclasses()      # --vdnn_budget 12GiB
Trainer(..., callbacks=[OffloadCallback(offloading)])
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Optional

from vdnn.step.plan import Plan

_PREFIX = "vdnn_"


@dataclass(frozen=True)
class OffloadArguments:
    """Each is the option of vdnn.offload that it is named after, as text or a number. Not slotted, since the parsers of
    configurations look for defaults on the class."""

    # Optional[...], not `| None`: argument parsers read these annotations.
    vdnn_policy: str = field(default="auto", metadata={"help": "name of a policy"})
    vdnn_budget: Optional[str] = field(  # noqa: UP045
        default=None, metadata={"help": "device memory a step may take: 12GiB, 80%, min; default: what the device has"}
    )
    vdnn_plan: Optional[str] = field(  # noqa: UP045
        default=None, metadata={"help": "file of a plan to follow, instead of a policy and a budget"}
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
    vdnn_offload_window: str = field(default="256MiB", metadata={"help": "limit of copies to the host in flight"})
    vdnn_reload_window: str = field(default="256MiB", metadata={"help": "limit of what is reloaded ahead of its use"})

    def options(self) -> dict[str, Any]:
        """The keyword arguments of vdnn.offload, with the plan loaded from its file."""
        options = {name.removeprefix(_PREFIX): _read(value) for name, value in dataclasses.asdict(self).items()}
        if options["plan"] is not None:
            options["plan"] = Plan.load(options["plan"])
        return options

    @classmethod
    def from_options(cls, **options: Any) -> OffloadArguments:
        """Of options that are text and numbers. What is no option is refused, by name."""
        known = [one.name.removeprefix(_PREFIX) for one in dataclasses.fields(cls)]
        unknown = sorted(set(options) - set(known))
        if unknown:
            raise TypeError(f"OffloadArguments: unknown {', '.join(unknown)}; there are {', '.join(known)}.")
        return cls(**{f"{_PREFIX}{name}": value for name, value in options.items()})


def _read(value: Any) -> Any:
    """A command line gives "0" where a program would give 0."""
    return int(value) if isinstance(value, str) and value.isdecimal() else value
