"""The options of vdnn.offload as a dataclass like TrainingArguments, for command lines and configuration files.

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
    """Each field is the option of vdnn.offload of that name, as text or a number. The class has no slots, since parsers
    of configuration files look for defaults on the class."""

    # Optional[...], not `| None`: argument parsers read these annotations.
    vdnn_policy: str = field(default="auto", metadata={"help": "the name of a policy"})
    vdnn_budget: Optional[str] = field(  # noqa: UP045
        default=None, metadata={"help": "device memory of a step: 12GiB, 80%, min; none: all of it"}
    )
    vdnn_device: Optional[str] = field(  # noqa: UP045
        default=None, metadata={"help": "cuda; sim to try it on the CPU; none: the GPU that the tensors are on"}
    )
    vdnn_min_bytes: str = field(default="1MiB", metadata={"help": "smaller saves stay on the device"})
    vdnn_host_budget: Optional[str] = field(  # noqa: UP045
        default=None, metadata={"help": "how much host memory may be pinned"}
    )
    vdnn_warmup_steps: int = field(default=1, metadata={"help": "steps before the one that is recorded"})
    vdnn_recompute: bool = field(default=True, metadata={"help": "a plan may recompute instead of offloading"})
    vdnn_integrity: bool = field(default=False, metadata={"help": "compare reloaded with offloaded bytes"})

    def options(self) -> dict[str, Any]:
        """The keyword arguments of vdnn.offload."""
        return {name.removeprefix(_PREFIX): _read(value) for name, value in dataclasses.asdict(self).items()}

    @classmethod
    def from_options(cls, **options: Any) -> OffloadArguments:
        """Takes options of vdnn.offload that are text or numbers, without the prefix. Raises TypeError for others."""
        known = [option.name.removeprefix(_PREFIX) for option in dataclasses.fields(cls)]
        unknown = sorted(set(options) - set(known))
        if unknown:
            raise TypeError(f"OffloadArguments: expected {', '.join(known)}, got {', '.join(unknown)}.")
        return cls(**{f"{_PREFIX}{name}": value for name, value in options.items()})


def _read(value: Any) -> Any:
    """A command line passes "0" where a program passes 0."""
    return int(value) if isinstance(value, str) and value.isdecimal() else value
