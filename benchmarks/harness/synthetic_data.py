"""Synthetic batches of a workload, made on this machine and brought by a real torch DataLoader.

A sample is made from its number, so every worker makes the same one. What comes is copied into the workload's own
inputs, between steps: a step reads the same tensors each time, as with a loop's static buffers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.data import DataLoader, Dataset

from benchmarks.models.workload import Workload

# More than any run takes: the loader never runs dry.
_SAMPLES = 1 << 40


@dataclass(frozen=True, slots=True)
class DataOptions:
    """`workers` None: no loader, the same inputs in every step."""

    workers: int | None = None
    pin_memory: bool = False


@dataclass(frozen=True, slots=True)
class SampleForm:
    """Of one input without its batch. Of whole numbers `below` is what they are less than."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    below: int | None


class SyntheticSamples(Dataset[tuple[Tensor, ...]]):
    """Random inputs, each the same whenever it is asked for."""

    def __init__(self, forms: tuple[SampleForm, ...]) -> None:
        self._forms = forms

    def __len__(self) -> int:
        return _SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        draw = torch.Generator().manual_seed(index)
        return tuple(_drawn(form, draw) for form in self._forms)


def _drawn(form: SampleForm, draw: torch.Generator) -> Tensor:
    if form.below is not None:
        return torch.randint(form.below, form.shape, dtype=form.dtype, generator=draw)
    return torch.randn(form.shape, generator=draw).to(form.dtype)


def forms_of(workload: Workload) -> tuple[SampleForm, ...]:
    """Of inputs with data: of whole numbers the range is what they show."""
    return tuple(
        SampleForm(
            tuple(one.shape[1:]), one.dtype, None if one.is_floating_point() else max(int(one.max().item()) + 1, 1)
        )
        for one in workload.inputs
    )


_left: list[AbstractContextManager[object]] = []


def _leave_modes(worker: int) -> None:
    """In a worker, which was forked from within a virtual machine's modes, if there is one: its tensors are none of the
    machine's, and its device does not live in this process. For good."""
    _left.append(_disable_current_modes())
    _left[-1].__enter__()


class Feed:
    """Brings the next batch into a workload's inputs. Close it: its workers end then."""

    def __init__(self, workload: Workload, options: DataOptions) -> None:
        self._inputs = workload.inputs
        self._batches: Iterator[Any] | None = None
        if options.workers is None:
            return
        self._samples = SyntheticSamples(forms_of(workload))
        loader = DataLoader(
            self._samples,
            batch_size=len(workload.inputs[0]),
            num_workers=options.workers,
            pin_memory=options.pin_memory,
            sampler=range(_SAMPLES),
            worker_init_fn=_leave_modes if options.workers else None,
        )
        self._batches = iter(loader)

    def next(self) -> None:
        if self._batches is None:
            return
        for mine, brought in zip(self._inputs, next(self._batches), strict=True):
            mine.copy_(brought, non_blocking=True)

    def first(self) -> None:
        """The first batch again, whichever was brought last: for a step that is compared with others'."""
        if self._batches is None:
            return
        samples = [self._samples[index] for index in range(len(self._inputs[0]))]
        for place, mine in enumerate(self._inputs):
            mine.copy_(torch.stack([sample[place] for sample in samples]))

    def close(self) -> None:
        self._batches = None  # the last reference: its workers are told to end
