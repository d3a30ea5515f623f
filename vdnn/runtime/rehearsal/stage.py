"""The stage of a rehearsal: all that makes a program on a virtual machine behave as it would on the card."""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Iterator

from torch._subclasses import fake_tensor

from vdnn.hardware import HardwareProfile
from vdnn.runtime.machine.virtual_machine import VirtualMachine
from vdnn.runtime.rehearsal.attention_masks import masks_as_on_a_gpu
from vdnn.runtime.rehearsal.gpu_calls import OnTheCard, gpu_calls
from vdnn.runtime.rehearsal.host_values import HostValues
from vdnn.runtime.torch_internals.backward_modes import backward_under
from vdnn.runtime.torch_internals.grouped_products import grouped_products_of_all_dtypes
from vdnn.runtime.torch_internals.plain_imports import imports_without_modes
from vdnn.runtime.torch_internals.random_state import same_random_numbers


@contextlib.contextmanager
def stage(machine: VirtualMachine) -> Iterator[HostValues]:
    """Enter it after a virtual machine whose tensors have no data. Yields what answers for values."""
    with (
        _quiet(),
        _fewer_collections(),
        same_random_numbers(),
        masks_as_on_a_gpu() as masks,
        imports_without_modes(masks.imported),
        grouped_products_of_all_dtypes(),
        gpu_calls(),
        HostValues(machine.tracker.track, machine=machine) as values,
        backward_under(lambda: _functions(values, machine.profile)),
        _functions(values, machine.profile),
    ):
        yield values


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Torch logs a traceback for each error of a shape, which the program gets as an exception anyway."""
    logger = logging.getLogger(fake_tensor.__name__)
    before = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = before


@contextlib.contextmanager
def _fewer_collections() -> Iterator[None]:
    """Python looks for cycles of garbage after this many new containers. Here each operation makes several, and the
    graph of a loop over time has millions: a sixth of the time of such a rehearsal was in those searches."""
    young, *older = gc.get_threshold()
    gc.set_threshold(10 * young, *older)
    try:
        yield
    finally:
        gc.set_threshold(young, *older)


@contextlib.contextmanager
def _functions(values: HostValues, profile: HardwareProfile) -> Iterator[None]:
    is_ampere = "bfloat16" in profile.flop_per_s  # the first generation that multiplies them
    with OnTheCard(values.array_of, is_ampere=is_ampere, statistics=values.statistics):
        yield
