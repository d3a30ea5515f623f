"""A session of vdnn.offload around the steps. For tiny workloads, small storages are offloaded, with small windows."""

from __future__ import annotations

import contextlib
import dataclasses
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
        sizes: dict[str, Any] = {}
        limits = vdnn.Limits(host_budget=HOST_BUDGET if trial.place.name == "cuda" else None)
        if trial.place.is_tiny:
            sizes = {"min_bytes": 0}
            limits = dataclasses.replace(limits, offload_window="64KiB", reload_window="128KiB")
        session = vdnn.offload(
            self._policy(),
            budget=trial.budget,
            device=trial.place.vdnn_device,
            limits=limits,
            **sizes,
        )
        try:
            with session:
                yield Opened(session)
        finally:
            session.close()  # frees its pinned memory for the next cell
