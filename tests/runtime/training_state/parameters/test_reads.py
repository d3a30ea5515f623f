"""The instructions behind the place where a program takes a parameter tell whether it reads the values."""

from __future__ import annotations

import dis
from collections.abc import Iterable, Iterator
from itertools import pairwise
from types import CodeType
from typing import Any

import pytest
import torch

from vdnn.runtime.training_state.parameters.value_reads import _reads_values


def shapes_of(parameters: Iterable[torch.Tensor]) -> object:
    return hash(tuple(tuple(one.shape) for one in parameters))


def sizes_of(parameters: Iterable[torch.Tensor]) -> object:
    return sum(one.numel() for one in parameters)


def dtypes_of(parameters: Iterable[torch.Tensor]) -> object:
    found = set()
    for one in parameters:
        if one.is_leaf:
            found.add(one.dtype)
    return found


def sums_of(parameters: Iterable[torch.Tensor]) -> object:
    return tuple(one.sum() for one in parameters)


def loops_of(code: CodeType) -> Iterator[tuple[CodeType, int, int]]:
    """The loops of a function and of what is inside it: where each instruction begins, and its last two bytes.
    Since Python 3.12, a frame that runs a generator may say that it is at the latter."""
    for one, following in pairwise(dis.get_instructions(code)):
        if one.opname == "FOR_ITER":
            yield code, one.offset, following.offset - 2
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from loops_of(constant)


@pytest.mark.parametrize(
    ("function", "reads"), [(shapes_of, False), (sizes_of, False), (dtypes_of, False), (sums_of, True)]
)
def test_a_loop_reads_values_unless_it_asks_for_facts_alone(function: Any, *, reads: bool) -> None:
    ((code, begin, last),) = loops_of(function.__code__)
    assert _reads_values(code, begin) is reads
    assert _reads_values(code, last) is reads
