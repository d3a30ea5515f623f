"""Gradients are bit for bit those of plain PyTorch if everything with a recipe is recomputed and the rest is offloaded.

The fast suite runs one sample of each operation and module; `make test-full` runs all of them, in every mode.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map_only

from tests.runtime.identity.databases import dtype_of, largest_sample_of, operations
from tests.runtime.identity.rig import identity_rigs
from tests.runtime.identity.runs import Inputs, Mode, run_call

CHUNKS = 20
Record = Callable[[str, object], None]
pytestmark = pytest.mark.filterwarnings("ignore")  # the database's own warnings


def surrounded(call: Callable[..., Any]) -> Callable[..., Any]:
    """Runs the operation on results of other operations, and saves its results in another one. So there is something to
    recompute on either side, with the operation's own recipe if it has one."""

    def three(*arguments: Any, **options: Any) -> Any:
        made = tree_map_only(torch.Tensor, lambda one: one.sin().sigmoid() if one.requires_grad else one, arguments)
        result = call(*made, **options)
        return tree_map_only(torch.Tensor, lambda one: one.sin() if one.grad_fn is not None else one, result)

    return three


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_every_operation_has_the_gradients_of_plain_torch(chunk: int, record_property: Record) -> None:
    with identity_rigs(chunk, record_property, "recompute-all") as rigs:
        for op, rig in zip(operations()[chunk::CHUNKS], itertools.cycle(rigs)):
            dtype = dtype_of(op)
            assert dtype is not None
            sample = largest_sample_of(op, dtype)
            assert sample is not None, f"{op.formatted_name} has no sample"
            for place, call in (("", sample.call), ("surrounded, ", surrounded(sample.call))):
                run = functools.partial(run_call, call, sample.arguments, Mode.TWICE, Inputs.FRESH)
                rig.compare(f"{place}{sample.name}", run)
        record_property("recomputes", [rig.counters.recomputes for rig in rigs])
        assert sum(rig.counters.recomputes for rig in rigs), "nothing was recomputed"
