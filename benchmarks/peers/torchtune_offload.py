"""torchtune's OffloadActivations, from its package, which is no longer maintained."""

from __future__ import annotations

from benchmarks.peers.package_hooks import PackageHooks

TORCHTUNE = PackageHooks("torchtune", "torchtune", "torchtune.training")
