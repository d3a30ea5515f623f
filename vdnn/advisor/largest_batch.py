"""Advises the largest batch that fits, where it takes less time for each sample or the present batch does not fit."""

from __future__ import annotations

from vdnn.advisor.advice import Advice, Kind
from vdnn.advisor.change import Change
from vdnn.advisor.evidence import Evidence, NotSeen, sample_gain_between
from vdnn.advisor.virtual_step import VirtualStep
from vdnn.bytesize import format_bytes
from vdnn.runtime.rehearsal.largest_batch import MOST, find_largest_batch

# A larger batch needs another learning rate, so it has to save at least this share of the time for a sample.
_WORTH_RETUNING = 0.01


def largest_batch(evidence: Evidence) -> list[Advice]:
    if not grows(evidence):
        raise NotSeen("the memory of a step does not depend on the batch")
    batch, samples = largest_that_fits(evidence), evidence.training.samples
    if batch is None or batch == evidence.training.batch:
        return []
    gain = sample_gain_between(evidence.base, _of(evidence, batch))
    if evidence.fits and gain.saved_time_share < _WORTH_RETUNING:
        return []
    room = format_bytes(evidence.budget_bytes)
    takes = f"a batch of {evidence.training.batch} takes {format_bytes(evidence.base.peak_bytes)} of {room}"
    limit = f"{batch} is the largest that fits."
    if batch == samples:
        limit = "all the data fits in one batch."
    elif batch == MOST:
        limit = f"{batch} fits, and no larger one was tried."
    return [
        Advice(
            Kind.LARGEST_BATCH,
            f"{takes}; {limit}",
            f"a batch of up to {batch}, with an adjusted learning rate",
            gain,
        )
    ]


def largest_that_fits(evidence: Evidence) -> int | None:
    """The largest batch that fits: one more sample does not fit, or does not exist. None if one sample does not fit."""
    batch = evidence.training.batch
    largest = find_largest_batch(
        lambda tried: evidence.budget_bytes - _of(evidence, tried).peak_bytes,
        # This batch and its double are rehearsed already. The search halves the double if it does not fit.
        first=batch if evidence.fits else 2 * batch,
        most=max(batch, min(MOST, evidence.training.samples or MOST)),
    )
    return largest or None


def grows(evidence: Evidence) -> bool:
    base = evidence.base
    return _of(evidence, 2 * base.batch).peak_bytes > base.peak_bytes


def _of(evidence: Evidence, batch: int) -> VirtualStep:
    change = Change() if batch == evidence.training.batch else Change(batch=batch)
    return evidence.step(change, f"a batch of {batch}")
