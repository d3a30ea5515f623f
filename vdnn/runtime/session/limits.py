"""vdnn.Limits: the limits of memory that few trainings set. The common one, `budget`, is an argument of vdnn.offload.

Limits checks its values when it is made, so that the traceback of a wrong one ends where the user wrote it. Without a
`host_budget`, the ranks of one node share its pinned memory equally: torchrun and similar launchers set
LOCAL_WORLD_SIZE to their number.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass

from vdnn import _C
from vdnn.bytesize import parse_bytes
from vdnn.runtime.storage.transport import WINDOW_BYTES

_RANKS_OF_NODE = "LOCAL_WORLD_SIZE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of memory for ``vdnn.offload(limits=...)``, each a text such as ``"64MiB"`` or a number of bytes.

    Args:
        host_budget: Limit of pinned host memory. Default: this rank's share of the node's memory.
        offload_window: Limit of the bytes that copies to the host in flight hold on the device. Default: 256 MiB, or
            an eighth of the budget if that is less.
        reload_window: Limit of the bytes that are reloaded ahead of their use. The same default.

    Raises:
        ValueError, TypeError: A value is not a size.

    Example:
        .. code-block:: python

            vdnn.offload(budget="12GiB", limits=vdnn.Limits(host_budget="64GiB"))
    """

    host_budget: int | str | None = None
    offload_window: int | str | None = None
    reload_window: int | str | None = None

    def __post_init__(self) -> None:
        for name in LIMITS:
            value = getattr(self, name)
            if value is not None:
                bytes_of(name, value)

    @property
    def host_bytes(self) -> int | None:
        return None if self.host_budget is None else parse_bytes(self.host_budget)

    def windows(self, budget_bytes: int | None) -> tuple[int, int]:
        """The bytes of the two windows under this budget; None: no budget, or one that depends on the step."""
        widest = WINDOW_BYTES if budget_bytes is None else min(WINDOW_BYTES, max(1, budget_bytes // 8))
        offload, reload = (
            widest if window is None else parse_bytes(window) for window in (self.offload_window, self.reload_window)
        )
        return offload, reload


LIMITS = tuple(limit.name for limit in dataclasses.fields(Limits))


def bytes_of(argument: str, size: int | str) -> int:
    """parse_bytes, with the name of the argument in its errors."""
    try:
        return parse_bytes(size)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{argument}: {error}") from None


def host_bytes_of_rank(environment: Mapping[str, str] = os.environ) -> int:
    """This rank's share of the node's default cap. 0 for a process that is alone: the pool's own limit applies."""
    value = environment.get(_RANKS_OF_NODE, "1")
    if not value.isdecimal() or int(value) < 1:
        raise ValueError(f"{_RANKS_OF_NODE}: expected the number of processes on this node, 1 or more, got {value!r}.")
    ranks = int(value)
    return 0 if ranks == 1 else _C.default_pinned_cap_bytes(_C.host_limits()) // ranks
