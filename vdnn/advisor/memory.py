"""Advice for a step that does not fit: vdnn.offload, checkpointing, or fewer samples at a time.

A step that fits gets no such advice: each of them would only make it slower.
"""

from __future__ import annotations

from vdnn.advisor.advice import Advice, Kind
from vdnn.advisor.change import Change
from vdnn.advisor.evidence import Evidence, NotSeen, gain_between, sample_gain_between
from vdnn.advisor.virtual_step import VirtualStep
from vdnn.bytesize import format_bytes
from vdnn.errors import BudgetError
from vdnn.runtime.rehearsal.largest_batch import MOST, find_largest_batch

# Each part costs a pass to rehearse and to run. If more are needed, a smaller batch is better.
_MOST_PARTS = 32


def offloading(evidence: Evidence) -> list[Advice]:
    if evidence.fits:
        return []
    try:
        step = evidence.step(Change(offload_bytes=evidence.budget_bytes), "under vdnn.offload")
    except BudgetError:
        return []  # no plan meets the budget
    if step.peak_bytes > evidence.budget_bytes:
        return []
    action = f'with vdnn.offload(budget="{_whole(evidence.budget_bytes)}"): around the training loop'
    return [_fitting(evidence, Kind.OFFLOAD, action, step)]


def checkpointing(evidence: Evidence) -> list[Advice]:
    if evidence.fits:
        return []
    step = evidence.step(Change(checkpointed=True), "with checkpointed blocks")
    if not step.blocks or step.peak_bytes > evidence.budget_bytes:
        return []
    action = (
        f"torch.utils.checkpoint.checkpoint(block, *inputs, use_reentrant=False) for each of the {step.blocks} blocks"
    )
    return [_fitting(evidence, Kind.CHECKPOINTING, action, step)]


def accumulation(evidence: Evidence) -> list[Advice]:
    """Advice to divide the batch into the fewest parts that fit, a power of two. Parts with more samples than the
    largest batch that fits are not tried."""
    if evidence.fits or not evidence.training.can_be_cut or not grows(evidence):
        return []
    largest = largest_that_fits(evidence)
    if largest is None:
        return []
    parts = 2
    while parts <= min(evidence.training.batch, _MOST_PARTS):
        if evidence.training.batch // parts > largest:
            parts *= 2
            continue
        step = evidence.step(Change(micro_batches=parts), f"in {parts} parts")
        if step.peak_bytes <= evidence.budget_bytes:
            samples = evidence.training.batch // parts
            action = f"{parts} times (loss(batch of {samples}) / {parts}).backward() before each optimizer.step()"
            return [_fitting(evidence, Kind.ACCUMULATION, action, step)]
        parts *= 2
    return []


def _fitting(evidence: Evidence, kind: Kind, action: str, step: VirtualStep) -> Advice:
    takes, room = format_bytes(evidence.base.peak_bytes), format_bytes(evidence.budget_bytes)
    return Advice(kind, f"a step takes {takes}, and {room} are available.", action, gain_between(evidence.base, step))


def _whole(nbytes: int) -> str:
    """Bytes as vdnn.parse_bytes takes them, rounded down to MiB."""
    return f"{nbytes // 2**20}MiB"


# Advises the largest batch that fits, where it takes less time for each sample or the present batch does not fit.

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
