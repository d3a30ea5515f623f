"""Gradients are bit for bit those of plain PyTorch, over torch's own database of operations.

The fast suite runs one sample of each operation; `make test-full` runs all of them, in every mode. Everything is
offloaded, sources are poisoned when they are released, and the order of all accesses is checked.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.runtime.identity.databases import OpSample, dtype_of, largest_sample_of, operations, samples_of
from tests.runtime.identity.rig import NOTHING_TO_MOVE, IdentityRig, identity_rigs
from tests.runtime.identity.runs import Inputs, Mode, run_call

CHUNKS = 40
Record = Callable[[str, object], None]
pytestmark = pytest.mark.filterwarnings("ignore")  # the database's own warnings


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_every_operation_has_the_gradients_of_plain_torch(chunk: int, record_property: Record) -> None:
    with identity_rigs(chunk, record_property) as rigs:
        for op, rig in zip(operations()[chunk::CHUNKS], itertools.cycle(rigs)):
            dtype = dtype_of(op)
            assert dtype is not None
            sample = largest_sample_of(op, dtype)
            assert sample is not None, f"{op.formatted_name} has no sample"
            _compare(rig, sample, Mode.TWICE)


@pytest.mark.full
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_every_sample_in_every_mode_has_the_gradients_of_plain_torch(chunk: int, record_property: Record) -> None:
    with identity_rigs(chunk, record_property) as rigs:
        for op in operations()[chunk::CHUNKS]:
            for index, sample in enumerate(all_samples_of(op)):
                for turn, (mode, inputs) in enumerate(itertools.product(modes_of(op), Inputs)):
                    _compare(rigs[(index + turn) % len(rigs)], sample, mode, inputs)


@pytest.mark.full
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_every_in_place_operation_has_the_outcome_of_plain_torch(chunk: int, record_property: Record) -> None:
    in_place = [op for op in operations() if op.inplace_variant is not None]
    with identity_rigs(chunk, record_property) as rigs:
        for op in in_place[chunk::CHUNKS]:
            for index, sample in enumerate(all_samples_of(op)):
                written = dataclasses.replace(sample, name=f"in-place {sample.name}", call=op.inplace_variant)
                for turn, mode in enumerate(modes_of(op)):
                    _compare(rigs[(index + turn) % len(rigs)], written, mode)


def all_samples_of(op: Any) -> Iterator[OpSample]:
    """The samples in the first dtype, and in complex numbers if they have a backward."""
    complex_too = {torch.complex64} & set(op.supported_backward_dtypes("cpu"))
    for dtype in dict.fromkeys((dtype_of(op), *complex_too)):
        assert dtype is not None
        yield from samples_of(op, dtype)


def modes_of(op: Any) -> list[Mode]:
    return [mode for mode in Mode if mode is not Mode.DOUBLE or op.supports_gradgrad]


def _compare(rig: IdentityRig, sample: OpSample, mode: Mode, inputs: Inputs = Inputs.FRESH) -> None:
    rig.compare(
        f"{sample.name}, {mode.value}, {inputs.value}",
        lambda: run_call(sample.call, sample.arguments, mode, inputs),
        may_stay=NOTHING_TO_MOVE if inputs is Inputs.FRESH and mode is not Mode.DOUBLE else None,
    )
