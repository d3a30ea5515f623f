"""torch.utils.swap_tensors, and what torch does by it, between steps: nobody of ours refers to a tensor weakly."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.runtime.unusual.every_mode import MODES, Factory, Step, assert_same_in
from vdnn.runtime.recompute import leaf_versions, observe, observe_parameters

Act = Callable[[nn.Module], None]


@pytest.fixture(autouse=True)
def conversions_swap() -> Iterator[None]:
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(before)


def load(model: nn.Module) -> None:
    state = {name: value.clone() for name, value in model.state_dict().items()}
    for value in state.values():
        if value.is_floating_point():
            value.mul_(0.5)
    model.load_state_dict(state)


def to_double_and_back(model: nn.Module) -> None:
    model.to(torch.float64)
    model.to(torch.float32)


def swap(model: nn.Module) -> None:
    for parameter in model.parameters():
        other = nn.Parameter(parameter.detach() * 0.75)
        other.grad = None if parameter.grad is None else parameter.grad.clone()
        torch.utils.swap_tensors(parameter, other)


def swap_two_layers(model: nn.Module) -> None:
    first, second = model.get_submodule("0"), model.get_submodule("3")
    torch.utils.swap_tensors(first.weight, second.weight)
    torch.utils.swap_tensors(first.bias, second.bias)


def swap_from_now_on(model: nn.Module) -> None:
    """Writes to the tensor that has the addresses of another one's implementation."""
    swap_two_layers(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)
    swap_two_layers(model)


def training(act: Act, *, ahead_of_the_step: bool) -> Factory:
    def begin() -> Step:
        norms = (nn.BatchNorm1d(12), nn.LayerNorm(12))
        model = nn.Sequential(nn.Linear(12, 12), norms[0], nn.ReLU(), nn.Linear(12, 12), norms[1], nn.GELU())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        inputs = [torch.randn(10, 12) for _ in range(3)]

        def step(index: int) -> Iterable[torch.Tensor | None]:
            loss = (model(inputs[index % 3] * 1.5) + 0.5).square().mean()
            loss.backward()
            found = [loss.detach(), *(one.grad.clone() for one in model.parameters() if one.grad is not None)]
            del loss
            if index % 2 and ahead_of_the_step:
                act(model)
            optimizer.step()
            optimizer.zero_grad()
            if index % 2 and not ahead_of_the_step:
                act(model)
            return [*found, *(one.detach() for one in model.parameters())]

        return step

    return begin


@pytest.mark.drawn(of=4)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ahead_of_the_step", [True, False], ids=["ahead of the step", "behind it"])
@pytest.mark.parametrize("act", [load, to_double_and_back, swap, swap_two_layers, swap_from_now_on])
def test_tensors_are_swapped_between_steps_as_in_plain(act: Act, ahead_of_the_step: bool, mode: str) -> None:
    assert_same_in(mode, training(act, ahead_of_the_step=ahead_of_the_step))


def read_by_an_addition(leaf: torch.Tensor) -> tuple[torch.Tensor, torch.autograd.graph.Node]:
    out = leaf + torch.zeros(3, requires_grad=True)
    assert out.grad_fn is not None
    return out, out.grad_fn


def test_a_version_is_known_of_the_tensor_that_was_observed_alone() -> None:
    leaf, other = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    observe(leaf)
    _, node = read_by_an_addition(leaf)
    assert leaf_versions.version_read(leaf, node) == 0
    del _, node
    torch.utils.swap_tensors(leaf, other)
    _, node = read_by_an_addition(leaf)
    assert leaf_versions.version_read(leaf, node) is None
    observe(leaf)
    assert leaf_versions.version_read(leaf, node) is None  # noted behind the operation
    _, later = read_by_an_addition(leaf)
    assert leaf_versions.version_read(leaf, later) == 0


def test_a_tensor_at_the_addresses_of_a_freed_one_is_not_taken_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    leaf, other = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    observe(leaf)
    _, node = read_by_an_addition(other)
    notes = leaf_versions._Notes()
    (seen,) = [one for (_, name), one in leaf_versions._notes._young.items() if name == id(leaf)]
    key = next(key for key in leaf_versions._notes._young if key[1] == id(leaf))
    notes.put((key[0], id(other)), replace(seen, implementation=other._cdata))
    monkeypatch.setattr(leaf_versions, "_notes", notes)
    assert leaf_versions.version_read(other, node) is None
    assert len(notes) == 0


def test_a_tensor_without_a_module_is_not_taken_for_one_of_a_freed_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaf_versions, "_notes", leaf_versions._Notes())
    module = nn.Linear(3, 3)
    observe_parameters(module)
    key = next(key for key in leaf_versions._notes._young if key[1] == id(module.weight))
    seen = leaf_versions._notes._young[key]
    del module
    leaf = torch.ones(3, requires_grad=True)
    leaf_versions._notes.put((key[0], id(leaf)), replace(seen, implementation=leaf._cdata))
    observe(leaf)
    _, node = read_by_an_addition(leaf)
    assert leaf_versions.version_read(leaf, node) == 0


def test_parameters_of_modules_that_are_made_anew_are_known_each_time() -> None:
    """They often have the addresses of those before them."""
    for _ in range(20):
        layer = nn.Linear(3, 3)
        leaf_versions.observe_parameters(layer)
        _, node = read_by_an_addition(layer.bias)
        assert leaf_versions.version_read(layer.bias, node) == layer.bias._version
        del layer, node, _


def test_a_shared_parameter_keeps_its_first_note() -> None:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.bias = first.bias
    leaf_versions.observe_parameters(first)
    _, node = read_by_an_addition(first.bias)
    leaf_versions.observe_parameters(second)
    assert leaf_versions.version_read(first.bias, node) == first.bias._version


def test_notes_of_freed_leaves_end() -> None:
    notes = leaf_versions._Notes()
    seen = leaf_versions._Seen(1, 0, 0, torch.empty(0), None)
    for name in range(5 * notes.CAPACITY):
        notes.put((0, name), seen)
        assert notes.get((0, 0)) is not None or name < 0
    assert len(notes) <= 2 * notes.CAPACITY
