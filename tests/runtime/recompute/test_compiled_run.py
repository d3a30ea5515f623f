"""Recipes run as code: one function for each structure, which drops each value behind its last reader."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from vdnn.errors import OperandModifiedError, VdnnError
from vdnn.runtime.recompute.compiled_run import fetch_for, run_for
from vdnn.runtime.recompute.given import Constant
from vdnn.runtime.recompute.layouts import UnknownLayoutError
from vdnn.runtime.recompute.operation import Call, Layout, Operation, Step

CPU = torch.device("cpu")


def call_of(*shape: int, dtype: torch.dtype = torch.float32) -> Call:
    return Call((), dtype, torch.Size(shape), CPU, 0)


def doubled(call: Call, x: torch.Tensor) -> torch.Tensor:
    return x * 2


def chain(operation: Operation, call: Call, length: int) -> tuple[Step, ...]:
    """Each step reads the value before it, and is its last reader."""
    return tuple(Step(operation, call, (number,), (number,)) for number in range(length))


def test_values_are_dropped_behind_their_last_reader() -> None:
    living: list[weakref.ref[torch.Tensor]] = []
    most = 0

    def counted(call: Call, x: torch.Tensor) -> torch.Tensor:
        nonlocal most
        made = x * 2
        living.append(weakref.ref(made))
        most = max(most, sum(one() is not None for one in living))
        return made

    steps = chain(Operation("counted", counted), call_of(4), 6)
    gc.disable()
    try:
        made = run_for(steps, 1)([torch.ones(4)], steps, "counted")
    finally:
        gc.enable()
    assert torch.equal(made, torch.full((4,), 64.0))
    assert most == 2, "what a step reads, and what it makes"


def test_one_function_serves_all_sizes_of_a_structure() -> None:
    operation = Operation("doubled", doubled)
    short, long = chain(operation, call_of(2), 2), chain(operation, call_of(3, 5), 2)
    run = run_for(short, 1)
    assert run is run_for(long, 1)
    assert run is not run_for(chain(operation, call_of(2), 3), 1)
    assert torch.equal(run([torch.ones(3, 5)], long, ""), torch.full((3, 5), 4.0))


def fails(call: Call, x: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("no kernel\nIf you're using torch.compile, wrap the kernel")


def out_of_memory(call: Call, x: torch.Tensor) -> torch.Tensor:
    raise torch.OutOfMemoryError("none left")


@pytest.mark.parametrize(
    ("run", "call", "error", "message"),
    [
        (fails, call_of(4), VdnnError, "cannot recompute a tensor by the recipe: made raised: no kernel$"),
        (out_of_memory, call_of(4), torch.OutOfMemoryError, "none left"),
        (doubled, call_of(5), VdnnError, r"made made shape \(4,\), expected \(5,\)"),
        (doubled, call_of(4, dtype=torch.float64), VdnnError, "made made torch.float32, expected torch.float64"),
    ],
)
def test_what_goes_wrong_in_a_step_names_the_recipe_and_the_operation(
    run: Any, call: Call, error: type[Exception], message: str
) -> None:
    steps = chain(Operation("made", run), call, 1)
    with pytest.raises(error, match=message):
        run_for(steps, 1)([torch.ones(4)], steps, "the recipe")


def test_a_value_of_unknown_strides_is_not_read_by_an_operation_whose_bits_need_them() -> None:
    """The first copy may have been made in another memory format if its operand is not contiguous."""
    copies, reads = Operation("copies", lambda call, x: x.clone(), layout=Layout.ASKED), Operation("reads", doubled)
    call = call_of(4, 3)
    steps = Step(copies, call, (0,), (0,)), Step(reads, call, (1,), (1,))
    run = run_for(steps, 1)
    assert torch.equal(run([torch.ones(4, 3)], steps, ""), torch.full((4, 3), 2.0))
    with pytest.raises(UnknownLayoutError, match="reads would read a value whose original strides are not known"):
        run([torch.ones(3, 4).t()], steps, "")


def test_what_is_given_is_fetched_by_its_kind() -> None:
    kept = torch.ones(3)
    fetched = fetch_for([(kept, 0), Constant(2.5)])([(kept, 0), Constant(2.5)], lambda packed: kept, "the recipe")
    assert torch.equal(fetched[0], kept)
    assert fetched[1] == 2.5
    kept.add_(1)
    with pytest.raises(OperandModifiedError, match="at version 1; expected version 0"):
        fetch_for([(kept, 0)])([(kept, 0)], lambda packed: kept, "the recipe")
