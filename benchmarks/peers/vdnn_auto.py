"""vdnn itself under a budget: with all of its actions, and with offload alone."""

from __future__ import annotations

from benchmarks.peers.vdnn_session import VdnnSession

VDNN_AUTO = VdnnSession("vdnn-auto", lambda: "auto", has_budget=True)
VDNN_AUTO_OFFLOAD = VdnnSession("vdnn-auto-offload", lambda: "auto-offload", has_budget=True)
