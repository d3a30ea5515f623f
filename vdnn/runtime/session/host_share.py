"""The default cap on pinned memory when several ranks train on one node: an equal share for each.

torchrun and similar launchers set LOCAL_WORLD_SIZE to the number of ranks on the node. A process that trains alone gets
the pinned pool's own limit.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from vdnn import _C

_VARIABLE = "LOCAL_WORLD_SIZE"


def ranks_of_node(environment: Mapping[str, str] = os.environ) -> int:
    value = environment.get(_VARIABLE, "1")
    if not value.isdecimal() or int(value) < 1:
        raise ValueError(f"{_VARIABLE}: expected the number of processes on this node, 1 or more, got {value!r}.")
    return int(value)


def host_bytes_of_rank(environment: Mapping[str, str] = os.environ) -> int:
    """This rank's share of the node's default cap. 0 for a process that is alone: the pool's own limit applies."""
    ranks = ranks_of_node(environment)
    return 0 if ranks == 1 else _C.default_pinned_cap_bytes(_C.host_limits()) // ranks
