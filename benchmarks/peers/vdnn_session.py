"""A session of vdnn.offload around the steps. For tiny workloads, small storages are offloaded, with small windows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import vdnn
from benchmarks.peers.peer import Opened, Peer, Trial

# Machines whose memory grows on demand report too little memory, so the cap is given explicitly.
HOST_BUDGET = "64GiB"


class VdnnSession(Peer):
    """A session with a policy. The first step warms up, the second is recorded, and the third follows the plan. On a
    GPU the third is a settling step, too."""

    settling_steps = 3
    virtual_settling_steps = 2

    def __init__(self, name: str, policy: Callable[[], Any], *, has_budget: bool) -> None:
        self.name = name
        self.has_budget = has_budget
        self._policy = policy

    @contextlib.contextmanager
    def open(self, trial: Trial) -> Iterator[Opened]:
        sizes: dict[str, Any] = (
            {"min_bytes": 0, "offload_window": "64KiB", "reload_window": "128KiB"} if trial.place.is_tiny else {}
        )
        if trial.place.name == "cuda":
            sizes["host_budget"] = HOST_BUDGET
        session = vdnn.offload(
            self._policy(),
            budget=trial.budget,
            device=trial.place.vdnn_device,
            warmup_steps=1,
            **sizes,
        )
        try:
            with session:
                yield Opened(session)
        finally:
            session.close()  # frees its pinned memory for the next cell
