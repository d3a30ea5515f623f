"""A session of vdnn.offload around the steps. For tiny workloads, small storages are offloaded, with small windows.

vDNN's policies of 2016 offload everything, the inputs of convolutions, or the first that fits. Releases and prefetches
are at the points of the paper's rules; docs/policies.md lists the differences. These peers take no budget: they have to
fit the device. vdnn's own policies get a budget: with all actions, and with offload alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import vdnn
from benchmarks.peers.peer import Opened, Peer, Trial
from vdnn.planning.catalogue import make_planner

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


VDNN_2016 = tuple(
    VdnnSession(name, lambda name=name: make_planner(name), has_budget=False)  # type: ignore[misc]
    for name in ("vdnn-all", "vdnn-conv", "vdnn-dyn")
)
VDNN_AUTO = VdnnSession("vdnn-auto", lambda: "auto", has_budget=True)
VDNN_AUTO_OFFLOAD = VdnnSession("vdnn-auto-offload", lambda: "auto-offload", has_budget=True)
