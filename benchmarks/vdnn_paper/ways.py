"""The ways of running a step that the benchmarks compare: a policy, with or without a budget."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Way:
    """The arguments of vdnn.offload for one way."""

    name: str
    policy: str
    budget: str | None = None


KEEP = Way("keep", "keep")
VDNN_ALL = Way("vdnn-all", "vdnn-all")
VDNN_CONV = Way("vdnn-conv", "vdnn-conv")
BUDGET = Way("budget 12 GiB", "auto", budget="12GiB")
# Keep is first, because the others are compared with it.
WAYS = (KEEP, VDNN_ALL, VDNN_CONV, BUDGET)
