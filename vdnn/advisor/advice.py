"""One advice: the finding, the code to write instead, and the gain, or why the gain is unknown."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from vdnn.bytesize import format_bytes
from vdnn.step.json_form import from_json, to_json

_A_THOUSANDTH = 0.001


class Kind(Enum):
    """The kinds of advice, in the order in which they are examined."""

    AMP = "mixed precision"
    TF32 = "tf32 products"
    OPTIMIZER_FORM = "fused optimizer"
    OPTIMIZER_STATE = "8-bit optimizer"
    BIAS_BEFORE_NORM = "bias before batch norm"
    CHUNKED_LOSS = "loss in chunks"
    SET_TO_NONE = "gradients filled with zeros"
    LARGEST_BATCH = "largest batch"
    TRAINING_PLAN = "training state on the host"
    OFFLOAD = "offloading"
    CHECKPOINTING = "checkpointing"
    ACCUMULATION = "gradient accumulation"
    LOADER_WORKERS = "loader workers"
    PINNED_MEMORY = "pinned memory"
    HOST_SYNC = "host syncs"
    DEBUGGING = "debugging tools"
    CHANNELS_LAST = "channels_last"
    CUDNN_BENCHMARK = "cudnn.benchmark"


class Basis(Enum):
    """How a gain is known."""

    PREDICTED = "predicted"
    MEASURED = "measured"
    UNKNOWN = "cannot be predicted here"


class Per(Enum):
    """The unit of work that a time is for. If the batch changes, only times for as many samples can be compared."""

    STEP = "a step"
    SAMPLES = "for as many samples"


@dataclass(frozen=True, slots=True)
class Gain:
    """Times and bytes before and after a change; None if unknown. `reason` says how the gain is known, or why not."""

    basis: Basis
    reason: str
    before_ns: int | None = None
    after_ns: int | None = None
    before_bytes: int | None = None
    after_bytes: int | None = None
    per: Per = Per.STEP

    @property
    def saved_ns(self) -> int:
        """The time saved: negative if the step takes longer, 0 if a time is unknown."""
        return 0 if self.before_ns is None or self.after_ns is None else self.before_ns - self.after_ns

    @property
    def saved_bytes(self) -> int:
        return 0 if self.before_bytes is None or self.after_bytes is None else self.before_bytes - self.after_bytes

    @property
    def saved_time_share(self) -> float:
        return self.saved_ns / self.before_ns if self.before_ns else 0.0

    @property
    def saved_bytes_share(self) -> float:
        return self.saved_bytes / self.before_bytes if self.before_bytes else 0.0

    @property
    def is_one(self) -> bool:
        """True if the step is faster, or smaller in the same time."""
        return self.saved_ns > 0 or (self.saved_ns == 0 and self.saved_bytes > 0)

    @property
    def is_worth_a_line(self) -> bool:
        """True if the gain is at least a thousandth of the time or of the bytes."""
        return self.is_one and (self.saved_time_share >= _A_THOUSANDTH or self.saved_bytes_share >= _A_THOUSANDTH)

    def __str__(self) -> str:
        if self.basis is Basis.UNKNOWN:
            return f"{self.basis.value}: {self.reason}"
        said = [one for one in (self._time(), self._bytes()) if one]
        return f"{'; '.join(said) or 'none'} ({self.basis.value}: {self.reason})"

    def _time(self) -> str:
        if not self.saved_ns or self.before_ns is None:
            return ""
        longer = "" if self.saved_ns > 0 else " longer"
        share = _share_text(self.saved_time_share)
        return f"{_time_text(abs(self.saved_ns))} of {_time_text(self.before_ns)} {self.per.value}, {share}{longer}"

    def _bytes(self) -> str:
        if not self.saved_bytes or self.before_bytes is None or self.after_bytes is None:
            return ""
        if self.saved_bytes < 0:
            return f"takes {format_bytes(self.after_bytes)}, not {format_bytes(self.before_bytes)}"
        share = _share_text(self.saved_bytes_share)
        return f"{format_bytes(self.saved_bytes)} of {format_bytes(self.before_bytes)}, {share}"


def unknown(reason: str) -> Gain:
    return Gain(Basis.UNKNOWN, reason)


@dataclass(frozen=True, slots=True)
class Advice:
    """One advice. `seen` is a sentence that says what was counted and where; `action` is a line to paste.

    `makes_it_fit` is True if the step exceeds the budget without the change and fits with it.
    """

    kind: Kind
    seen: str
    action: str
    gain: Gain
    makes_it_fit: bool = False

    @property
    def rank(self) -> tuple[int, float, int]:
        """The sort key: first advice that makes the step fit, by time; then by time saved; then by bytes saved; then
        advice with an unknown gain."""
        gain = self.gain
        if self.makes_it_fit:
            return (0, -gain.saved_time_share, -gain.saved_bytes)
        if gain.basis is Basis.UNKNOWN:
            return (2, 0, 0)
        return (1, -gain.saved_time_share, -gain.saved_bytes)


def _time_text(ns: int) -> str:
    return f"{ns / 1e6:.2f} ms" if ns >= 1_000_000 else f"{ns / 1e3:.1f} us"


def _share_text(share: float) -> str:
    percent = abs(share) * 100
    return "less than 0.01 %" if percent < 0.01 else f"{percent:.2f} %" if percent < 1 else f"{percent:.1f} %"


# Advices: the result of one examination, ordered by gain, as text and as JSON.

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
