"""Runs a program in plain PyTorch and under sessions, in every way that a training's state leaves the device.

A program is a generator: what it does up to its first `yield` happens before the session begins, the rest inside of it,
and what is behind a second `yield` after the session is closed. It trains a `Training`, and appends to `found` what is
to be compared, beside parameters, gradients and state.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.runtime.training_state.conftest import Manage
from tests.runtime.training_state.loops import Training, begin, same
from tests.runtime.training_state.ways import SOME_STAY, options_of

Program = Callable[[Training], Iterator[None]]

# Those in which gradients or parameters leave, or a step is elsewhere or later.
every_way = pytest.mark.parametrize(
    "way", ["gradients", "all", SOME_STAY, "deferred", "deferred, gradients", "on the cpu", "all, on the cpu"]
)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """Fused, so that a step on the CPU has the same bits."""
    return torch.optim.AdamW(parameters, lr=1e-2, fused=True)


def run(program: Program, way: str | None, manage: Manage, make: Any = adamw, **options: bool) -> list[Any]:
    """Returns all that `program` comes to; plain if there is no `way`."""
    training = begin(make, "cpu", **options)
    rest = program(training)
    next(rest)
    inside: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    if way is not None:
        inside = manage(training.optimizer, **options_of(way, training.model))
    with inside:
        next(rest, None)
    for _ in rest:
        pass
    parameters = list(training.model.parameters())
    gradients = [None if one.grad is None else one.grad.clone() for one in parameters]
    state = training.optimizer.state_dict()["state"]
    return [*training.found, *(one.detach().clone() for one in parameters), *gradients, state]


def check(program: Program, way: str, manage: Manage, make: Any = adamw, **options: bool) -> None:
    """Plain PyTorch repeats its own bits, and those are the ones of a session."""
    expected = run(program, None, manage, make, **options)
    assert same(expected, run(program, None, manage, make, **options))
    found = run(program, way, manage, make, **options)
    different = [index for index, (one, other) in enumerate(zip(expected, found, strict=True)) if not same(one, other)]
    assert not different, f"of {len(expected)} results, {different} differ"
