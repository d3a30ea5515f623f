"""The recompute cost that a successful trial measured."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RecomputeCost:
    """The recompute cost, in the terms of a recording: see vdnn.step.recording.Recompute."""

    compute_ns: int
    extra_bytes: int
    kept_bytes: int = 0
    discard_ns: int = 0
    discard_bytes: int = 0
    issue_ns: int = 0
