"""Evidence on one training: rehearsals of its step, unchanged and with any change, and what real steps did."""

from __future__ import annotations

from collections.abc import Callable

from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

from vdnn.advisor.advice import Basis, Gain, Per
from vdnn.advisor.change import Change
from vdnn.advisor.host_reads import HostReads
from vdnn.advisor.loop_training import LoopTraining
from vdnn.advisor.observation import Observed
from vdnn.advisor.parts import ExaminedTraining, staged_of
from vdnn.advisor.virtual_step import VirtualStep, rehearse
from vdnn.errors import BudgetError
from vdnn.hardware import HardwareProfile
from vdnn.runtime.rehearsal.rehearsed_training import RehearsedTraining, rehearse_training
from vdnn.runtime.rehearsal.subjects import Subject

REHEARSED = "two rehearsals"

# Torch raises these where a value or a size depends on data.
_NEEDS_DATA = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)


class NotSeen(Exception):
    """A kind of advice cannot be examined. The message is the reason, in a few words."""


class Evidence:
    """Rehearsals and observations of one training. Each rehearsal runs when it is first needed, and once."""

    def __init__(
        self,
        training: ExaminedTraining,
        profile: HardwareProfile,
        *,
        budget_bytes: int | None = None,
        observed: Observed | None = None,
        host_reads: HostReads | None = None,
        on_progress: Callable[[str], None] = lambda doing: None,
    ) -> None:
        self.training, self.profile, self.observed = training, profile, observed
        self.budget_bytes = profile.memory_bytes if budget_bytes is None else budget_bytes
        self._host_reads = host_reads
        self._on_progress = on_progress
        self._known: dict[Change, VirtualStep] = {}
        self._refused = ""
        self._rehearsed_training: RehearsedTraining | None = None

    @property
    def base(self) -> VirtualStep:
        """The unchanged step."""
        return self.step(Change(), "the step as it is")

    @property
    def fits(self) -> bool:
        return self.base.peak_bytes <= self.budget_bytes

    @property
    def loop(self) -> LoopTraining:
        if not isinstance(self.training, LoopTraining):
            raise NotSeen("a function of a batch size has no loop")
        return self.training

    @property
    def real(self) -> Observed:
        """The observation of real steps. Raises NotSeen if none ran."""
        if self.observed is None:
            raise NotSeen("a function of a batch size has no loop")
        if not self.observed.steps:
            raise NotSeen(self.observed.failure or "no real steps were requested")
        return self.observed

    def step(self, change: Change, doing: str) -> VirtualStep:
        """Rehearse the step with `change`. Raises NotSeen if the step runs with data, but cannot run without."""
        if self._refused:
            raise NotSeen(self._refused)
        if change not in self._known:
            self._on_progress(f"rehearsing {doing}")
            try:
                self._known[change] = rehearse(self.training, self.profile, change, self._host_reads)
            except BudgetError:
                raise
            except Exception as error:
                ran = self.observed is not None and self.observed.steps > 0
                if self._known or not (ran or isinstance(error.__cause__ or error, _NEEDS_DATA)):
                    raise
                first = str(error).strip().splitlines() or [""]
                self._refused = f"the step cannot be rehearsed without data: {type(error).__name__}: {first[0]}"
                raise NotSeen(self._refused) from error
        return self._known[change]

    def rehearsed_training(self) -> RehearsedTraining:
        """The step's units, for plans of the whole training. Call it only if `base` could be rehearsed."""
        if self._rehearsed_training is None:
            self._on_progress("rehearsing the units of the model")
            subject = Subject(lambda: staged_of(self.training.parts(self.training.batch)))
            self._rehearsed_training = rehearse_training(subject, self.profile, name=self.training.name)
        return self._rehearsed_training

    def gain_of(self, change: Change, doing: str) -> Gain:
        """The difference of two rehearsals."""
        return gain_between(self.base, self.step(change, doing))


def gain_between(before: VirtualStep, after: VirtualStep) -> Gain:
    return Gain(
        Basis.PREDICTED,
        REHEARSED,
        before_ns=before.step_ns,
        after_ns=after.step_ns,
        before_bytes=before.peak_bytes,
        after_bytes=after.peak_bytes,
    )


def sample_gain_between(before: VirtualStep, after: VirtualStep) -> Gain:
    """The gain for as many samples as one step of `before` has."""
    return Gain(
        Basis.PREDICTED,
        REHEARSED,
        before_ns=before.step_ns,
        after_ns=round(after.step_ns * before.batch / after.batch),
        before_bytes=before.peak_bytes,
        after_bytes=after.peak_bytes,
        per=Per.SAMPLES,
    )
