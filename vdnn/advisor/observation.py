"""Observes a few real steps of a training loop, on copies of its model and optimizer.

It measures the loader's time for a batch, counts host syncs, and compares the shapes of inputs. The time of a step is
measured without the census, which takes time itself.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from vdnn.advisor.census import Census, Counts
from vdnn.advisor.diagnostics import tools_that_are_on
from vdnn.advisor.host_reads import HostReads
from vdnn.advisor.host_syncs import HostSync
from vdnn.advisor.loop_training import LoopTraining
from vdnn.advisor.parts import Parts
from vdnn.errors import InvalidArgumentError
from vdnn.runtime.rehearsal.user_code import user_code
from vdnn.runtime.torch_internals.random_state import random_state_kept

Clock = Callable[[], int]
_FEWEST_TIMED = 2
_NO_MORE = object()


@dataclass(frozen=True, slots=True)
class Observed:
    """The observation of `steps` steps on `device`.

    `loader_ns` is the loader's time for a batch, without a step in between; None if there were too few batches.
    `step_ns` is measured on a GPU only. `filled_gradients` and `filled_bytes` count gradients filled with zeros in one
    step.
    """

    device: str
    steps: int
    loader_ns: int | None
    batch_bytes: int
    shapes: int
    syncs: tuple[HostSync, ...]
    tools: tuple[str, ...]
    filled_gradients: int
    filled_bytes: int
    convolutions: int
    step_ns: int | None
    failure: str = ""


def observe(training: LoopTraining, steps: int, host_reads: HostReads, clock: Clock = time.perf_counter_ns) -> Observed:
    """Run and observe `steps` steps. Sets the sample of `training`, and notes in `host_reads` what the host read."""
    loader = training.loader
    sampler = getattr(loader, "sampler", None)
    with random_state_kept(getattr(loader, "generator", None), getattr(sampler, "generator", None)):
        batches, waits = _batches(training, steps, clock)
        training.take_sample(batches[0])
        tools = set(tools_that_are_on())
        counts: list[Counts] = []
        step_ns, failure = None, ""
        try:
            if steps:
                counts, step_ns = _run(training, batches[:steps], host_reads, clock)
        except torch.OutOfMemoryError as error:
            failure = f"no room for a copy of the model: {str(error).splitlines()[0]}"
    shapes = {tuple(_shapes(batch)) for batch in batches}
    last = counts[-1] if counts else Counts()
    for one in counts:
        tools |= one.tools
    return Observed(
        device=str(training.device),
        steps=len(counts),
        loader_ns=round(statistics.median(waits[1:])) if len(waits) > _FEWEST_TIMED else None,
        batch_bytes=sum(one.numel() * one.itemsize for one in _tensors(batches[0])),
        shapes=len(shapes),
        syncs=_by_step(counts),
        tools=tuple(sorted(tools)),
        filled_gradients=last.filled_gradients,
        filled_bytes=last.filled_bytes,
        convolutions=last.convolutions,
        step_ns=step_ns,
        failure=failure,
    )


def _batches(training: LoopTraining, steps: int, clock: Clock) -> tuple[list[Any], list[int]]:
    """The first batches and the time for each. The caller ignores the first time, in which the workers start."""
    batches: list[Any] = []
    waits: list[int] = []
    taking = user_code("taking a batch of the loader", has_data=True)
    with taking:
        iterator = iter(training.loader)
    for _ in range(max(steps, _FEWEST_TIMED) + 1):
        begin_ns = clock()
        with taking:
            batch = next(iterator, _NO_MORE)
        if batch is _NO_MORE:
            break
        batches.append(batch)
        waits.append(clock() - begin_ns)
    if not batches:
        raise InvalidArgumentError(argument="loader", expected="at least one batch", got="none")
    return batches, waits


def _run(
    training: LoopTraining, batches: list[Any], host_reads: HostReads, clock: Clock
) -> tuple[list[Counts], int | None]:
    model, optimizer, loss = training.copies()
    on_device = [tree_map_only(torch.Tensor, lambda one: one.to(training.device), batch) for batch in batches]
    counts = []
    for batch in on_device:
        parts = training.parts_of(model, optimizer, loss, batch)
        with Census(model, optimizer, host_reads) as census:
            census.begin_step()
            with user_code("running a step", has_data=True):
                do_step(parts)
        counts.append(census.counts)
    if training.device.type != "cuda":
        return counts, None
    took = []
    for batch in on_device:
        parts = training.parts_of(model, optimizer, loss, batch)
        torch.cuda.synchronize(training.device)
        begin_ns = clock()
        do_step(parts)
        torch.cuda.synchronize(training.device)
        took.append(clock() - begin_ns)
    return counts, round(statistics.median(took))


def do_step(parts: Parts) -> None:
    """Do one step: the program's own, or loss, backward pass, optimizer step and zero_grad if it has none."""
    if parts.step is not None:
        parts.step()
        return
    parts.compute_loss().backward()  # type: ignore[no-untyped-call]
    if parts.optimizer is not None:
        parts.optimizer.step()
        parts.optimizer.zero_grad()


def _by_step(counts: list[Counts]) -> tuple[HostSync, ...]:
    """The host syncs with their mean counts and waits per step. A count is at least 1."""
    total: Counter[tuple[str, str]] = Counter()
    waited: Counter[tuple[str, str]] = Counter()
    for one in counts:
        total.update(one.syncs)
        waited.update(one.waited_ns)
    steps = len(counts)
    return tuple(HostSync(*key, max(1, round(n / steps)), round(waited[key] / steps)) for key, n in total.items())


def _tensors(batch: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]


def _shapes(batch: Any) -> list[tuple[int, ...]]:
    return [tuple(one.shape) for one in _tensors(batch)]
