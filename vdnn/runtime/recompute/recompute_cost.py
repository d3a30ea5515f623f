"""What is known of a rebuild that was tried and came out right."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Proof:
    """What it costs, as the recording has it."""

    compute_ns: int
    extra_bytes: int
    kept_bytes: int = 0
    giving_up_ns: int = 0
    giving_up_bytes: int = 0
