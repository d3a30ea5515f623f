"""Synthetic batches of a workload, made on this machine and loaded by a real torch DataLoader.

A sample is made from its number, so every worker makes the same one. Batches are copied into the workload's own inputs
between steps: a step reads the same tensors each time, as in a loop with static buffers.
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

# More than any run takes, so that the loader never ends.
_SAMPLES = 1 << 40


@dataclass(frozen=True, slots=True)
class DataOptions:
    """Options of the loader. With `workers` None there is no loader, and every step has the same inputs."""

    workers: int | None = None
    pin_memory: bool = False


@dataclass(frozen=True, slots=True)
class SampleForm:
    """The form of one input without its batch dimension. Whole numbers are less than `below`."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    below: int | None


class SyntheticSamples(Dataset[tuple[Tensor, ...]]):
    """Random inputs. The same index always gives the same sample."""

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
    """The forms of a workload's inputs, which must have data: the range of whole numbers is read from them."""
    return tuple(
        SampleForm(
            tuple(one.shape[1:]), one.dtype, None if one.is_floating_point() else max(int(one.max().item()) + 1, 1)
        )
        for one in workload.inputs
    )


_left: list[AbstractContextManager[object]] = []


def _leave_modes(worker: int) -> None:
    """Disable a virtual machine's modes in a worker that was forked inside them, for the rest of its life. The worker's
    tensors are not the machine's, and the machine's device does not exist in this process."""
    _left.append(_disable_current_modes())
    _left[-1].__enter__()


class Feed:
    """Copies the next batch into a workload's inputs. Close it to end its workers."""

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
        for own, loaded in zip(self._inputs, next(self._batches), strict=True):
            own.copy_(loaded, non_blocking=True)

    def first(self) -> None:
        """Copy the first batch again, for the step whose gradients are compared with those of other peers."""
        if self._batches is None:
            return
        samples = [self._samples[index] for index in range(len(self._inputs[0]))]
        for index, own in enumerate(self._inputs):
            own.copy_(torch.stack([sample[index] for sample in samples]))

    def close(self) -> None:
        self._batches = None  # the last reference: the DataLoader ends its workers
