"""Advices: the result of one examination, ordered by gain, as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from vdnn.advisor.advice import Advice, Kind
from vdnn.bytesize import format_bytes
from vdnn.step.json_form import from_json, to_json

FORM, VERSION = "vdnn advice", 1


@dataclass(frozen=True, slots=True)
class NotExamined:
    """A kind of advice that could not be examined, and the reason."""

    kind: Kind
    reason: str


@dataclass(frozen=True, slots=True)
class Advices:
    """The advices for one training.

    `step_ns` and `peak_bytes` are predicted for the unchanged step on `hardware`; None if it cannot be rehearsed.
    `examined` has every kind that was examined, found or not. `device` names where real steps ran; "" if none did.
    """

    name: str
    batch: int
    hardware: str
    budget_bytes: int
    step_ns: int | None
    peak_bytes: int | None
    device: str
    real_steps: int
    found: tuple[Advice, ...]
    examined: tuple[Kind, ...]
    not_examined: tuple[NotExamined, ...]

    def __iter__(self) -> Iterator[Advice]:
        return iter(self.found)

    def __len__(self) -> int:
        return len(self.found)

    def of(self, kind: Kind) -> tuple[Advice, ...]:
        return tuple(one for one in self.found if one.kind is kind)

    def as_json(self) -> str:
        """One object, with "form" and "version"; times in ns."""
        return to_json(self, FORM, VERSION)

    @classmethod
    def from_json(cls, text: str) -> Advices:
        return from_json(text, cls, FORM, VERSION)

    def __str__(self) -> str:
        lines = [f"{self.name}, batch {self.batch}, on {self.hardware}: {self._step()}"]
        for number, advice in enumerate(self.found, start=1):
            lines += [
                f"{number:3}. {advice.kind.value}: {advice.seen}",
                f"     do:   {advice.action}",
                f"     gain: {advice.gain}",
            ]
        if not self.found:
            lines.append("  no advice")
        found = {advice.kind for advice in self.found}
        without_finding = ", ".join(kind.value for kind in self.examined if kind not in found)
        if without_finding:
            lines.append(f"  examined without a finding: {without_finding}")
        by_reason: dict[str, list[str]] = {}
        for one in self.not_examined:
            by_reason.setdefault(one.reason, []).append(one.kind.value)
        lines += [f"  not examined: {', '.join(kinds)}: {reason}" for reason, kinds in by_reason.items()]
        return "\n".join(lines)

    def _step(self) -> str:
        real = f"; {self.real_steps} real steps on {self.device}" if self.real_steps else ""
        if self.step_ns is None or self.peak_bytes is None:
            return f"cannot be rehearsed{real}"
        room = format_bytes(self.budget_bytes)
        over = "" if self.peak_bytes <= self.budget_bytes else ", which does not fit"
        peak = format_bytes(self.peak_bytes)
        return f"a step takes {self.step_ns / 1e6:.2f} ms and {peak} of {room}{over} (predicted){real}"
