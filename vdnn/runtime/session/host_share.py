"""How much host memory one of several processes on a node may pin, where nobody said: they share it fairly.

torchrun and its like say in LOCAL_WORLD_SIZE how many there are. A process that is alone has the pool's own limit.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from vdnn import _C

_COUNT = "LOCAL_WORLD_SIZE"


def ranks_of_node(environment: Mapping[str, str] = os.environ) -> int:
    said = environment.get(_COUNT, "1")
    if not said.isdecimal() or int(said) < 1:
        raise ValueError(f"{_COUNT}: expected how many processes train on this node, 1 or more, got {said!r}.")
    return int(said)


def host_bytes_of_rank(environment: Mapping[str, str] = os.environ) -> int:
    """0 for one that is alone: what the pool takes for its own limit."""
    ranks = ranks_of_node(environment)
    return 0 if ranks == 1 else _C.default_pinned_cap_bytes(_C.host_limits()) // ranks
