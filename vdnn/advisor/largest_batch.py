"""Finds the largest batch that fits with few rehearsals: memory grows by about the same bytes for each sample."""

from __future__ import annotations

from vdnn.advisor.advice import Advice, Kind
from vdnn.advisor.change import Change
from vdnn.advisor.evidence import Evidence, NotSeen, sample_gain_between
from vdnn.advisor.virtual_step import VirtualStep
from vdnn.bytesize import format_bytes

_MOST = 1 << 20
# A larger batch needs another learning rate, so it has to save at least this share of the time for a sample.
_WORTH_RETUNING = 0.01
_HALVES_EVERY = 3


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
    elif batch == _MOST:
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
    start = evidence.training.batch
    most = max(start, min(_MOST, evidence.training.samples or _MOST))
    fits, over = (start, most + 1) if evidence.fits else (0, start)
    guess, tried = _along_the_line(evidence), 0
    while over - fits > 1:
        guess = min(max(guess, fits + 1), over - 1)
        tried += 1
        if _of(evidence, guess).peak_bytes <= evidence.budget_bytes:
            fits = guess
        else:
            over = guess
        guess = _next_guess(evidence, fits, over, tried, most)
    return fits or None


def _next_guess(evidence: Evidence, fits: int, over: int, tried: int, most: int) -> int:
    """Interpolate between the largest batch known to fit and the smallest known not to: memory is nearly linear in the
    batch. Every third guess bisects, so that the search ends."""
    if over > most:
        return fits + 1 if tried == 1 else 2 * fits
    if not fits or tried % _HALVES_EVERY == 0:
        return (fits + over) // 2
    low, high = _of(evidence, fits).peak_bytes, _of(evidence, over).peak_bytes
    return fits + (evidence.budget_bytes - low) * (over - fits) // (high - low)


def _along_the_line(evidence: Evidence) -> int:
    """The batch at which the line through this batch and its double meets the budget."""
    base, double = evidence.base, _of(evidence, 2 * evidence.base.batch)
    each_bytes = (double.peak_bytes - base.peak_bytes) / base.batch
    return base.batch + int((evidence.budget_bytes - base.peak_bytes) // each_bytes)


def grows(evidence: Evidence) -> bool:
    base = evidence.base
    return _of(evidence, 2 * base.batch).peak_bytes > base.peak_bytes


def _of(evidence: Evidence, batch: int) -> VirtualStep:
    change = Change() if batch == evidence.training.batch else Change(batch=batch)
    return evidence.step(change, f"a batch of {batch}")
