"""The options of vdnn.offload as data, for command lines and configuration files, in the manner of TrainingArguments.

parser = HfArgumentParser((TrainingArguments, OffloadArguments))
training, offloading = parser.parse_args_into_dataclasses()      # --vdnn_budget 12GiB
Trainer(..., callbacks=[OffloadCallback(offloading)])
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Optional

_PREFIX = "vdnn_"


@dataclass(frozen=True)
class OffloadArguments:
    """Each is the option of vdnn.offload that it is named after, as text or a number. Not slotted, since the parsers of
    configurations look for defaults on the class."""

    # Optional[...], not `| None`: argument parsers read these annotations.
    vdnn_policy: str = field(default="auto", metadata={"help": "what decides: a policy by name"})
    vdnn_budget: Optional[str] = field(  # noqa: UP045
        default=None, metadata={"help": "what a step may take of the device: 12GiB, 80%, min; none: what it has"}
    )
    vdnn_device: Optional[str] = field(  # noqa: UP045
        default=None, metadata={"help": "cuda; sim to try it on the CPU; none: the GPU that the tensors are on"}
    )
    vdnn_min_bytes: str = field(default="1MiB", metadata={"help": "smaller saves stay on the device"})
    vdnn_host_budget: Optional[str] = field(  # noqa: UP045
        default=None, metadata={"help": "how much host memory may be pinned"}
    )
    vdnn_warmup_steps: int = field(default=1, metadata={"help": "steps before the one that is recorded"})
    vdnn_recompute: bool = field(default=True, metadata={"help": "a plan may recompute instead of moving"})
    vdnn_integrity: bool = field(default=False, metadata={"help": "compare what comes back with what left"})

    def options(self) -> dict[str, Any]:
        """As vdnn.offload takes them."""
        return {name.removeprefix(_PREFIX): _read(value) for name, value in dataclasses.asdict(self).items()}

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
