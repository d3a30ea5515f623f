"""Writes through `.data` into a part of a storage that nobody has saved yet, between saves of its other parts.

Solvers of differential equations collect the stages of a step so: plain PyTorch is right, because the bytes that were
saved first stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import vdnn
from tests.runtime.rigs.limits import grouped
from tests.runtime.unusual.every_mode import MODES, Step, assert_same_in
from vdnn.runtime.machine.virtual_machine import VirtualMachine
from vdnn.runtime.storage.unseen_writes import joins_unseen_writes

Tensor = torch.Tensor
STAGES = 6


class Assign(torch.autograd.Function):
    """Writes a row without a new version, and returns the same tensor with another history."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, value: Tensor, index: int) -> Tensor:
        ctx.index = index
        rows.data[index] = value
        return rows

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        return gradient, gradient[ctx.index], None


def stages() -> Callable[[], Step]:
    """Each stage is made of all earlier ones, and written by a custom Function."""

    def factory() -> Step:
        x, weight = torch.randn(64, requires_grad=True), torch.nn.Parameter(torch.randn(STAGES))
        optimizer = torch.optim.SGD([weight], lr=0.01)

        def step(_: int) -> list[Tensor | None]:
            optimizer.zero_grad()
            x.grad = None
            rows = torch.zeros(STAGES, 64)
            rows = assigned(rows, x, 0)
            for index in range(STAGES - 1):
                value = (rows[: index + 1] * weight[: index + 1, None]).sum(0).tanh()
                rows = assigned(rows, value, index + 1)
            loss = (rows * weight[:, None]).sum() + x.sum()
            del rows, value  # nobody holds the rows in the backward pass
            loss.backward()
            optimizer.step()
            return [x.grad, weight.grad, weight.detach().clone()]

        return step

    def assigned(rows: Tensor, value: Tensor, index: int) -> Tensor:
        found: Tensor = Assign.apply(rows, value, index)
        return found

    return factory


@pytest.mark.parametrize("mode", MODES)
def test_rows_that_are_written_after_a_copy_are_restored_as_they_were_saved(mode: str) -> None:
    assert_same_in(mode, stages())


def test_so_are_they_if_each_is_copied_at_once() -> None:
    assert_same_in("vdnn-all", stages(), **grouped({"offload_window": 1, "reload_window": 1}))


def test_halves_of_what_torch_made_share_one_copy() -> None:
    """The second half is saved after the copy was issued."""
    with VirtualMachine("titan-x", fake=False) as machine:
        x, layer = torch.randn(32, 16), torch.nn.Linear(16, 64)
        with vdnn.offload("vdnn-all", device=machine, min_bytes=0) as session:
            gate, up = layer(x).chunk(2, -1)
            squared = gate.square()
            loss = (squared * 2 + up.square()).sum()
            del gate, up, squared
            loss.backward()
    assert (session.counters.saves, session.counters.storages, session.counters.shared_saves) == (3, 2, 1)


@pytest.mark.parametrize("is_copied", [False, True])
def test_only_a_view_that_a_function_made_of_more_than_was_saved_is_managed_on_its_own(is_copied: bool) -> None:
    x, row_bytes = torch.randn(64, requires_grad=True), 4 * 64
    rows: Tensor = Assign.apply(torch.zeros(STAGES, 64), x, 0)
    managed: Any = SimpleNamespace(facts=SimpleNamespace(begin=0), copy=object() if is_copied else None, discarded=None)
    managed.saved_bytes = saved = (row_bytes, 3 * row_bytes)
    for within in (rows[1:3], rows[1:2], rows[2:3]):
        assert not joins_unseen_writes(managed, saved, within, 0)
    assert managed.saved_bytes == saved
    assert not joins_unseen_writes(managed, saved, torch.zeros(STAGES, 64)[:3], 0), "torch's own operations write seen"
    for beyond in (rows[1:4], rows[:2]):
        assert joins_unseen_writes(managed, saved, beyond, 0) is is_copied
