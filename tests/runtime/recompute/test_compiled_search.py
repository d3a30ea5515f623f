"""Compiled searches: one serves every layer and length, and notices any fact that differs.

Each recipe is compared with the search (conftest.py) and its result with the original, byte for byte (saving.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.runtime.recompute.saving import Saving
from tests.runtime.recompute.shadow import Shadow
from vdnn.runtime.recompute import compiled_search, observe_flags
from vdnn.runtime.recompute.compiled_search import Trace


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.up, self.down, self.dropout = nn.Linear(16, 64), nn.Linear(64, 16), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = (one.view(2, -1, 2, 8).transpose(1, 2) for one in self.qkv(self.norm(x)).split(16, 2))
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + self.dropout(self.out(mixed))
        return x + self.dropout(self.down(functional.gelu(self.up(self.norm(x)))))


def saved_by(run: Callable[[], torch.Tensor]) -> Saving:
    with Saving(expensive=True) as saving:
        run().sum().backward()
    assert saving.failures == []
    return saving


def step_of(model: nn.Module, length: int = 8) -> Callable[[], torch.Tensor]:
    return lambda: model(torch.randn(2, length, 16, requires_grad=True))


def found_by_a_search(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the recipes that searches find from here on."""
    names: list[str] = []
    search = compiled_search.search_recipe

    def noted(*args: Any) -> Any:
        found = search(*args)
        if found is not None:
            names.append(found[0].name)
        return found

    monkeypatch.setattr(compiled_search, "search_recipe", noted)
    return names


def test_searches_of_two_blocks_serve_every_block_and_length(monkeypatch: pytest.MonkeyPatch, shadow: Shadow) -> None:
    saved_by(step_of(nn.Sequential(Block(), Block())))
    searched = found_by_a_search(monkeypatch)
    before = shadow.compared
    model = nn.Sequential(*[Block() for _ in range(5)])
    recipes = sum(len(saved_by(step_of(model, length)).recipes) for length in (8, 5, 12))
    assert searched == []
    assert shadow.compared - before == recipes > 100


def test_a_save_without_a_recipe_is_searched_without_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is searched in every step, and a trace costs several times as much as the search."""
    traced = list[object]()
    make = compiled_search.Trace.__init__

    def noted(self: compiled_search.Trace, *args: Any) -> None:
        traced.append(args)
        make(self, *args)

    monkeypatch.setattr(compiled_search.Trace, "__init__", noted)
    weight = torch.randn(16, 16, requires_grad=True)
    saving = saved_by(lambda: (weight * 2).exp().sin() @ weight)
    assert len(traced) == len(saving.recipes)


def dropped(p: float) -> Callable[[], torch.Tensor]:
    model = nn.Sequential(nn.Linear(16, 16), nn.Dropout(p), nn.Linear(16, 16))
    return lambda: model(torch.randn(64, 16))


def normed(eps: float) -> Callable[[], torch.Tensor]:
    model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16, eps=eps), nn.Tanh(), nn.Linear(16, 16))
    return lambda: model(torch.randn(4, 16))


def of_two(are_same: bool) -> Callable[[], torch.Tensor]:
    def run() -> torch.Tensor:
        x = torch.randn(64, 16, requires_grad=True)
        a, b = x.sin(), x.cos()
        return (a * (a if are_same else b)).exp() * a.exp() * b.exp()

    return run


def activated(module: nn.Module) -> Callable[[], torch.Tensor]:
    model = nn.Sequential(nn.Linear(16, 16), module, nn.Linear(16, 16))
    return lambda: model(torch.randn(64, 16))


def added(alpha: float) -> Callable[[], torch.Tensor]:
    def run() -> torch.Tensor:
        x = torch.randn(64, 16, requires_grad=True)
        return torch.add(x.sin(), x.cos(), alpha=alpha).exp()

    return run


def scaled(number: float) -> Callable[[], torch.Tensor]:
    weight = torch.randn(16, 16, requires_grad=True)
    return lambda: (torch.randn(64, 16, requires_grad=True).sin() * number) @ weight


def raised(exponent: float) -> Callable[[], torch.Tensor]:
    weight = torch.randn(16, 16, requires_grad=True)
    return lambda: (torch.randn(64, 16, requires_grad=True).sin() ** exponent) @ weight


OTHER_FACTS = {
    "dropout's p": (dropped(0.1), dropped(0.4)),
    "eps of a norm": (normed(1e-5), normed(0.5)),
    "the same operand twice": (of_two(False), of_two(True)),
    "two operands where one was read twice": (of_two(True), of_two(False)),
    "another activation": (activated(nn.Tanh()), activated(nn.Sigmoid())),
    "another form of one activation": (activated(nn.GELU()), activated(nn.GELU("tanh"))),
    "another slope": (activated(nn.LeakyReLU(0.1)), activated(nn.LeakyReLU(0.3))),
    "alpha of a sum": (added(1), added(0.25)),
    "alpha that was not 1": (added(0.25), added(1)),
    "alpha of a scaled sum": (added(0.5), added(0.25)),
    "the type of an exponent": (raised(2), raised(2.0)),
    "the sign of a zero": (scaled(0.0), scaled(-0.0)),
}


@pytest.mark.parametrize("name", OTHER_FACTS)
def test_another_fact_of_the_step_at_hand_is_read_and_not_remembered(name: str) -> None:
    first, second = OTHER_FACTS[name]
    names = [saved_by(run).names for run in (first, first, second, first, second)]
    assert names[1]
    assert names[2] == names[4]


def test_another_setting_is_the_recipes_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    recipes = []
    was = torch.are_deterministic_algorithms_enabled()
    try:
        for is_on in (False, False, True):
            torch.use_deterministic_algorithms(is_on)
            recipes.append(saved_by(activated(nn.Tanh())).recipes)
    finally:
        torch.use_deterministic_algorithms(was)
        observe_flags()
    flags = [one[0].template.flags for one in recipes]
    assert [one == flags[0] for one in flags[1:]] == [True, False]


def test_a_leaf_that_was_written_to_is_not_read() -> None:
    weight = torch.randn(16, requires_grad=True)

    def run(writes: bool) -> Callable[[], torch.Tensor]:
        def step() -> torch.Tensor:
            made = (torch.randn(4, 16, requires_grad=True).sin() + weight).exp()
            if writes:
                with torch.no_grad():
                    weight.mul_(2)
            return made.exp()

        return step

    first = saved_by(run(False)).names
    assert saved_by(run(True)).names == saved_by(run(True)).names
    assert saved_by(run(False)).names == first


@pytest.mark.parametrize("name", ["eps of a norm", "another slope", "alpha of a scaled sum"])
def test_the_comparison_notices_a_search_that_remembers_a_fact(
    name: str, monkeypatch: pytest.MonkeyPatch, shadow: Shadow
) -> None:
    monkeypatch.setattr(Trace, "_add_to_key", lambda *args: None)
    first, second = OTHER_FACTS[name]
    saved_by(first)
    saved_by(first)  # it makes its first template
    with Saving(expensive=True) as saving:
        second().sum().backward()
    assert shadow.differences
    assert saving.failures
    shadow.differences.clear()
