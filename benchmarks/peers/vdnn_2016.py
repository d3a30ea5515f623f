"""vDNN's policies of 2016, as vdnn plans them: offload everything, the inputs of convolutions, or the first that fits.

Releases and prefetches are at the points of the paper's rules; docs/policies.md lists the differences. These peers take
no budget: they have to fit the device.
"""

from __future__ import annotations

from benchmarks.peers.vdnn_session import VdnnSession
from vdnn.planning.catalogue import make_planner

VDNN_2016 = tuple(
    VdnnSession(name, lambda name=name: make_planner(name), has_budget=False)  # type: ignore[misc]
    for name in ("vdnn-all", "vdnn-conv", "vdnn-dyn")
)
