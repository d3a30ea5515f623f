"""Dispatch modes of a moment are told from those that were entered since, on each thread."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vdnn.runtime.torch_internals.saved_modes import DispatchModes
from vdnn.runtime.torch_internals.tensor_kinds import num_dispatch_modes


class Seeing(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.seen += 1
        return func(*args, **(kwargs or {}))


KNOWN, OTHER = Seeing(), Seeing()


@pytest.fixture
def modes() -> Iterator[DispatchModes]:
    KNOWN.seen = OTHER.seen = 0
    with KNOWN:
        yield DispatchModes()


def operate(modes: DispatchModes, entered: list[Seeing]) -> None:
    with contextlib.ExitStack() as stack:
        for one in entered:
            stack.enter_context(one)
        before = num_dispatch_modes()
        with modes.without_others() or contextlib.nullcontext():
            torch.ones(2)
        assert num_dispatch_modes() == before


@pytest.mark.parametrize(
    ("entered", "is_elsewhere", "known_sees"),
    [([], False, 1), ([OTHER], False, 1), ([], True, 0), ([OTHER], True, 0), ([KNOWN, OTHER], True, 1)],
)
def test_modes_that_were_entered_since_see_nothing(
    modes: DispatchModes, entered: list[Seeing], is_elsewhere: bool, known_sees: int
) -> None:
    if is_elsewhere:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(operate, modes, entered).result()
    else:
        operate(modes, entered)
    assert (OTHER.seen, KNOWN.seen) == (0, known_sees)


def test_there_are_no_others_where_none_was_entered(modes: DispatchModes) -> None:
    assert modes.without_others() is None
    with OTHER:
        assert modes.without_others() is not None
