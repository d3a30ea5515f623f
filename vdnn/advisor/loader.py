"""Advice on the loader: more workers if the card waits for batches, and pinned memory if copies block the host."""

from __future__ import annotations

import math
import os

from torch.utils.data import DataLoader, IterableDataset

from vdnn.advisor.advice import Advice, Basis, Gain, Kind
from vdnn.advisor.evidence import Evidence, NotSeen
from vdnn.bytesize import format_bytes

# A measured wait below this share of a step is noise.
_WORTH_A_CHANGE = 0.02


def loader_workers(evidence: Evidence, cores: int | None = None) -> list[Advice]:
    """With n workers, a batch takes an n-th of the time that one worker needs. Without workers, the card waits for all
    of it."""
    loader, loader_ns, step_ns = _loader(evidence), _loader_ns(evidence), step_ns_of(evidence)
    cores = len(os.sched_getaffinity(0)) if cores is None else cores
    now = loader.num_workers
    work_ns = loader_ns * max(1, now)
    wait_ns = loader_ns if now == 0 else max(0, loader_ns - step_ns)
    wanted = min(cores, math.ceil(work_ns / max(1, step_ns)))
    if wait_ns < _WORTH_A_CHANGE * step_ns or wanted <= now:
        return []
    left_ns = max(0, work_ns // wanted - step_ns)
    known = "measured" if evidence.observed is not None and evidence.observed.step_ns else "predicted"
    gain = Gain(
        Basis.PREDICTED,
        f"from the measured loader and the {known} step; this machine has {cores} cores",
        before_ns=step_ns + wait_ns,
        after_ns=step_ns + left_ns,
    )
    if not gain.is_one:
        return []
    shards = "; an IterableDataset then has to be shared among them" if _is_stream(loader) else ""
    return [
        Advice(
            Kind.LOADER_WORKERS,
            f"the loader takes {loader_ns / 1e6:.2f} ms for a batch (measured) with {now} workers, and a step takes "
            f"{step_ns / 1e6:.2f} ms: the card waits {wait_ns / (wait_ns + step_ns):.0%} of the time.",
            f"DataLoader(..., num_workers={wanted}, persistent_workers=True){shards}",
            gain,
        )
    ]


def pinned_memory(evidence: Evidence) -> list[Advice]:
    """Advice if the copy of a batch takes a relevant share of a step: from pinned memory it can run beside the step."""
    loader, observed = _loader(evidence), evidence.observed
    if observed is None:
        raise NotSeen("the loader was not observed")
    if loader.pin_memory or not observed.batch_bytes:
        return []
    profile, step_ns = evidence.profile, step_ns_of(evidence)
    copy_ns = round(observed.batch_bytes / profile.to_device_bytes_per_s * 1e9) + profile.link_latency_ns
    gain = Gain(
        Basis.PREDICTED,
        "the copy of a batch at the link's rate, beside the step and not before it; from pageable memory it is slower",
        before_ns=step_ns + copy_ns,
        after_ns=step_ns,
    )
    if gain.saved_time_share < _WORTH_A_CHANGE:
        return []
    return [
        Advice(
            Kind.PINNED_MEMORY,
            f"batches of {format_bytes(observed.batch_bytes)} are in pageable memory, and a copy from it blocks the "
            "host.",
            'DataLoader(..., pin_memory=True), and batch.to("cuda", non_blocking=True)',
            gain,
        )
    ]


def step_ns_of(evidence: Evidence) -> int:
    """The measured time of a step if there is a GPU, else the time predicted for the card."""
    observed = evidence.observed
    return observed.step_ns if observed is not None and observed.step_ns is not None else evidence.base.step_ns


def _loader(evidence: Evidence) -> DataLoader[object]:
    loader = evidence.loop.loader
    if not isinstance(loader, DataLoader):
        raise NotSeen(f"the loader is not a DataLoader but a {type(loader).__name__}")
    return loader


def _loader_ns(evidence: Evidence) -> int:
    observed = evidence.observed
    if observed is None or observed.loader_ns is None:
        raise NotSeen("the loader has too few batches to be timed")
    return observed.loader_ns


def _is_stream(loader: DataLoader[object]) -> bool:
    return isinstance(loader.dataset, IterableDataset)
