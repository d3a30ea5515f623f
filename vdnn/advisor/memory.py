"""Advice for a step that does not fit: vdnn.offload, checkpointing, or fewer samples at a time.

A step that fits gets no such advice: each of them would only make it slower.
"""

from __future__ import annotations

from vdnn.advisor.advice import Advice, Kind
from vdnn.advisor.change import Change
from vdnn.advisor.evidence import Evidence, gain_between
from vdnn.advisor.largest_batch import grows, largest_that_fits
from vdnn.advisor.virtual_step import VirtualStep
from vdnn.bytesize import format_bytes
from vdnn.errors import BudgetError

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
