"""Runs torch's own database of operations: every recipe that is found recomputes bit for bit, for every sample.

A multiplication after the operation saves its result. So the operation itself is recomputed, from leaves and from the
results of another operation. The operation's own saves are tried too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

from tests.runtime.identity.databases import OpSample, dtype_of, largest_sample_of, operations, samples_of
from tests.runtime.identity.runs import leaves_of
from tests.runtime.recompute.saving import Saving
from vdnn.runtime.recompute import observe

CHUNKS = 8
LEAST = 100  # recipes in a chunk of the fast suite; fewer would mean that the table is no longer reached
Record = Callable[[str, object], None]
pytestmark = pytest.mark.filterwarnings("ignore")  # the database's own warnings


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_what_has_a_recipe_is_recomputed_bit_for_bit(chunk: int, record_property: Record) -> None:
    samples = []
    for op in operations()[chunk::CHUNKS]:
        dtype = dtype_of(op)
        assert dtype is not None
        sample = largest_sample_of(op, dtype)
        assert sample is not None, f"{op.formatted_name} has no sample"
        samples += _and_in_place(op, [sample])
    assert _recomputed(samples, record_property) >= LEAST


@pytest.mark.full
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_what_has_a_recipe_is_recomputed_bit_for_bit_from_every_sample(chunk: int, record_property: Record) -> None:
    for op in operations()[chunk::CHUNKS]:
        supported = op.supported_backward_dtypes("cpu")
        also = [dtype for dtype in (torch.bfloat16, torch.float16, torch.complex64) if dtype in supported]
        for dtype in dict.fromkeys((dtype_of(op), *also)):
            assert dtype is not None
            _recomputed(_and_in_place(op, samples_of(op, dtype)), record_property)


def _and_in_place(op: Any, samples: Iterable[OpSample]) -> Iterator[OpSample]:
    for sample in samples:
        yield sample
        if op.inplace_variant is not None:
            yield replace(sample, name=f"in-place {sample.name}", call=op.inplace_variant)


def _recomputed(samples: Iterable[OpSample], record: Record) -> int:
    """The number of recipes that were found and run. Fails if a result differs."""
    saves, operations_done, failures = 0, Counter[str](), list[str]()
    count = 0
    for sample in samples:
        for is_fresh in (False, True):
            with Saving() as saving:
                _run(sample, is_fresh)
            failures += [f"{sample.name}: {failure}" for failure in saving.failures]
            saves += saving.saves
            count += len(saving.recipes)
            operations_done += saving.operations
    record("saves, recipes, operations done again", (saves, count, dict(operations_done)))
    assert not failures, f"{len(failures)} failures:\n" + "\n".join(failures[:50])
    return count


def _run(sample: OpSample, is_fresh: bool) -> None:
    """Run the sample on leaves, or on the results of another operation on them."""
    torch.manual_seed(17)
    leaves, given = leaves_of(sample.arguments)
    for leaf in leaves:
        observe(leaf)
    args, kwargs = tree_map(_made_of, given) if is_fresh else given
    try:
        results = tree_leaves(sample.call(*args, **kwargs))
    except Exception:  # some samples are meant to be refused
        return
    for result in results:
        if isinstance(result, torch.Tensor) and result.requires_grad and result.layout is torch.strided:
            result * torch.ones((), dtype=result.dtype, requires_grad=True)


def _made_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.requires_grad and value.layout is torch.strided:
        return value.neg()
    return value
