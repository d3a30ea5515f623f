"""TRL's OffloadActivations, from its package."""

from __future__ import annotations

from benchmarks.peers.package_hooks import PackageHooks

TRL = PackageHooks("trl", "trl", "trl.models.activation_offloading")
