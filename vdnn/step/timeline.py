"""Timeline: the work of the compute stream and the copy engines in one step, and the allocated bytes.

Predicted and measured timelines have one type, so the error of a prediction is the difference of two of them. Times are
nanoseconds since the step began.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import Enum

from vdnn.step.json_form import load_file, save_text, to_json

_FORM, _VERSION = "vdnn timeline", 1


class Track(Enum):
    """The copy engine of one direction."""

    TO_HOST = "to host"
    TO_DEVICE = "to device"


@dataclass(frozen=True, slots=True)
class Copy:
    """One copy on its track. `lifetime` is its number in the step."""

    track: Track
    lifetime: int
    nbytes: int
    begin_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class Mark:
    """The compute stream at one point: it reached the point at `begin_ns`, stalled, and continued at `end_ns`.

    `allocated_bytes` are the bytes allocated at `end_ns`; `peak_bytes` is the most since the previous mark. Before
    `begin_ns` the compute stream waited `host_stall_ns` for the host, which had not issued its operations yet.
    """

    point: int
    begin_ns: int
    end_ns: int
    release_stall_ns: int
    reload_stall_ns: int
    allocated_bytes: int
    peak_bytes: int
    host_stall_ns: int = 0


@dataclass(frozen=True, slots=True)
class Timeline:
    """The timeline of one step. The host needs `host_ns` to issue it; 0 if nothing is known of the host."""

    source: str  # "measured" or "predicted"
    clock: str
    step_ns: int
    marks: tuple[Mark, ...]
    copies: tuple[Copy, ...]
    host_ns: int = 0

    @property
    def is_bound_by_host(self) -> bool:
        """True if the step takes as long as the host needs to issue it."""
        return 0 < self.step_ns <= self.host_ns

    @property
    def host_stall_ns(self) -> int:
        return sum(mark.host_stall_ns for mark in self.marks)

    @property
    def peak_bytes(self) -> int:
        return max((mark.peak_bytes for mark in self.marks), default=0)

    @property
    def release_stall_ns(self) -> int:
        return sum(mark.release_stall_ns for mark in self.marks)

    @property
    def reload_stall_ns(self) -> int:
        return sum(mark.reload_stall_ns for mark in self.marks)

    @property
    def stall_ns(self) -> int:
        return self.release_stall_ns + self.reload_stall_ns

    def copied_bytes(self, track: Track) -> int:
        return sum(copy.nbytes for copy in self.copies if copy.track is track)

    def busy_ns(self, track: Track) -> int:
        return sum(copy.end_ns - copy.begin_ns for copy in self.copies if copy.track is track)

    def save(self, path: str | os.PathLike[str]) -> None:
        save_text(to_json(self, _FORM, _VERSION), path)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Timeline:
        return load_file(path, Timeline, _FORM, _VERSION)


def host_sentence(needed: str, issue_ns: int, step_ns: int, *, is_bound: bool, waited: str = "") -> str:
    """How long the host needs to issue a step. `needed` is that time as text, `waited` follows the sentence."""
    if is_bound:
        return f"bound by the host: it needs {needed} to issue the step{waited}"
    share = 100 * issue_ns / step_ns if step_ns else 0.0
    return f"host: needs {needed} to issue the step, {share:.0f} % of it{waited}"
