"""Whoever holds a tensor or its memory is found by torch's and Python's counts, without knowing what it is."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch

from vdnn.runtime.torch_internals import memory_holders
from vdnn.runtime.torch_internals.memory_holders import (
    HolderCounts,
    gradient_is_held,
    is_used_natively,
    memory_is_held,
    value_is_held,
)

ALIASES: dict[str, Callable[[torch.Tensor], Any]] = {
    "detached": lambda tensor: tensor.detach(),
    "data": lambda tensor: tensor.data,
    "view": lambda tensor: tensor.detach()[1:],
    "storage": lambda tensor: tensor.untyped_storage(),
    "typed-storage": lambda tensor: torch.storage.TypedStorage(
        wrap_storage=tensor.untyped_storage(), dtype=tensor.dtype, _internal=True
    ),
    "numpy": lambda tensor: tensor.detach().numpy(),
    "dlpack": lambda tensor: torch.from_dlpack(tensor.detach()),
    "shared": lambda tensor: tensor.detach().share_memory_(),
    "set": lambda tensor: torch.empty(0).set_(tensor.detach()),  # type: ignore[call-overload]
}
HOLDERS = {
    **ALIASES,
    "variable": lambda tensor: tensor,
    "list": lambda tensor: [tensor],
    "capsule": lambda tensor: torch.utils.dlpack.to_dlpack(tensor),
    "numpy-of-itself": lambda tensor: tensor.numpy(),
    "dlpack-of-itself": lambda tensor: torch.from_dlpack(tensor),
}


def with_gradient() -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.randn(4))
    parameter.square().sum().backward()
    return parameter


@pytest.mark.parametrize("alias", ALIASES)
@pytest.mark.parametrize("is_trained", [True, False], ids=["trained", "frozen"])
def test_memory_is_held_as_long_as_an_alias_of_it_lives(alias: str, is_trained: bool) -> None:
    parameter = torch.nn.Parameter(torch.randn(4), requires_grad=is_trained)
    also: Any = [parameter, {"itself": parameter}]
    assert not memory_is_held(parameter)
    held = ALIASES[alias](parameter)
    assert memory_is_held(parameter)
    is_lent_for_ever = not parameter.untyped_storage().resizable()
    del held
    assert memory_is_held(parameter) is is_lent_for_ever
    assert also


def test_numpy_of_a_frozen_parameter_itself_holds_its_memory() -> None:
    parameter = torch.nn.Parameter(torch.randn(4), requires_grad=False)
    held = parameter.numpy()
    assert memory_is_held(parameter)
    del held


def test_dlpack_of_a_parameter_itself_and_a_graph_that_saved_it_hold_it_natively() -> None:
    frozen = torch.nn.Parameter(torch.randn(4), requires_grad=False)
    weight, shift = (torch.nn.Parameter(torch.randn(4)) for _ in range(2))
    assert not any(map(is_used_natively, (frozen, weight, shift)))
    held = torch.from_dlpack(frozen)
    loss = (weight.square() + shift).sum()
    assert list(map(is_used_natively, (frozen, weight, shift))) == [True, True, False]
    loss.backward()
    del held
    assert not any(map(is_used_natively, (frozen, weight, shift)))
    capsule = torch.utils.dlpack.to_dlpack(shift)
    assert is_used_natively(shift)
    del capsule, loss


@pytest.mark.parametrize("holder", HOLDERS)
def test_a_gradient_is_held_as_long_as_any_holder_of_it_lives(holder: str) -> None:
    parameter = with_gradient()
    assert not gradient_is_held(parameter)
    gradient = parameter.grad
    assert gradient is not None
    held = HOLDERS[holder](gradient)
    del gradient
    assert gradient_is_held(parameter)
    del held
    assert gradient_is_held(parameter) is (holder == "shared")


@pytest.mark.parametrize("holder", HOLDERS)
def test_a_value_is_held_as_long_as_any_holder_of_it_lives(holder: str) -> None:
    state: Any = {"mean": torch.randn(4), "others": [torch.randn(4)]}
    assert not value_is_held(lambda: state["mean"])
    assert not value_is_held(lambda: state["others"][0])
    held = HOLDERS[holder](state["mean"])
    assert value_is_held(lambda: state["mean"])
    del held
    assert value_is_held(lambda: state["mean"]) is (holder == "shared")


def test_a_known_holder_of_a_value_does_not_count() -> None:
    state = {"mean": torch.randn(4)}
    known = [state["mean"]]
    assert value_is_held(lambda: state["mean"])
    assert not value_is_held(lambda: state["mean"], HolderCounts(1, 0))
    assert known


@pytest.mark.parametrize("install", [sys.settrace, sys.setprofile], ids=lambda install: install.__name__)
def test_a_debugger_and_a_profiler_are_no_holders(install: Any) -> None:
    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        return trace if frame.f_locals else None

    parameter, state = with_gradient(), {"mean": torch.randn(4)}
    alone = torch.nn.Parameter(torch.randn(4))
    before = sys.gettrace() if install is sys.settrace else sys.getprofile()
    install(trace)
    try:
        found = gradient_is_held(parameter), value_is_held(lambda: state["mean"]), memory_is_held(alone)
    finally:
        install(before)
    assert found == (False, False, False)


def test_a_parameter_without_a_gradient_and_a_sparse_one_are_asked_as_others_are() -> None:
    table = torch.nn.Embedding(4, 2, sparse=True)
    assert not gradient_is_held(table.weight)
    table(torch.tensor([1])).sum().backward()
    assert not gradient_is_held(table.weight)
    held = table.weight.grad
    assert gradient_is_held(table.weight)
    assert held is not None


def test_without_torchs_count_of_a_tensor_all_but_native_holders_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """`_use_count` is private in torch."""
    monkeypatch.setattr(memory_holders, "_used", memory_holders._unknown_use_count)
    parameter = with_gradient()
    assert not gradient_is_held(parameter)
    for hold in (lambda: parameter.grad, lambda: parameter.grad.untyped_storage(), lambda: parameter.grad.detach()):  # type: ignore[union-attr]
        held = hold()
        assert gradient_is_held(parameter)
        del held
    assert not gradient_is_held(parameter)
