"""Backwards run without a session's hooks where they save nothing, and with them where they save."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import vdnn
from tests.runtime.rigs.networks import perceptron
from vdnn.runtime.session.session import Session

Hooks = tuple[Any, Any] | None
_run = torch.autograd._engine_run_backward


@pytest.fixture
def machine() -> Iterator[vdnn.VirtualMachine]:
    with vdnn.VirtualMachine("h100", fake=False) as machine:
        yield machine


def measuring(machine: vdnn.VirtualMachine, **options: Any) -> Session:
    """A session that follows its steps: only such a one has a gate."""
    return vdnn.offload("vdnn-all", device=machine, measure=True, min_bytes=0, **options)


@pytest.fixture
def session(machine: vdnn.VirtualMachine) -> Session:
    return measuring(machine)


def innermost() -> Hooks:
    hooks: Hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks


class Seen:
    """A model with an input, and which hooks its backwards had."""

    def __init__(self, model: Callable[[torch.Tensor], torch.Tensor] | None = None) -> None:
        self.model = model or perceptron()
        self.in_backward: list[Hooks] = []
        self.does: Callable[[], object] = lambda: None  # in the next backward

    def _look(self, _: torch.Tensor) -> None:
        self.in_backward.append(innermost())
        does, self.does = self.does, lambda: None
        does()

    def backward(self, **options: Any) -> None:
        x = torch.randn(4, 16, requires_grad=True)
        y = self.model(x)
        y.register_hook(self._look)
        y.sum().backward(**options)


def test_from_the_second_backward_on_there_are_none(session: Session) -> None:
    seen = Seen()
    with session:
        ours = innermost()
        for _ in range(3):
            seen.backward()
            assert innermost() == ours
    assert seen.in_backward == [ours, None, None]
    assert innermost() is None
    assert torch.autograd._engine_run_backward is _run


def test_they_stay_where_a_graph_of_the_backward_is_made(session: Session) -> None:
    seen = Seen()
    with session:
        ours = innermost()
        seen.backward()
        x = torch.randn(4, 16, requires_grad=True)
        y = seen.model(x).square()
        y.register_hook(seen._look)
        before = session.counters.saves
        (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        assert session.counters.saves > before
        gradient.register_hook(seen._look)
        gradient.square().sum().backward()
    assert seen.in_backward == [ours, ours, None]


def test_they_stay_where_a_backward_saves(session: Session) -> None:
    inner = perceptron()

    def reentrant(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = checkpoint(inner, x, use_reentrant=True)
        return result

    seen = Seen(reentrant)
    with session:
        ours = innermost()
        for _ in range(4):
            seen.backward()
    assert seen.in_backward == [ours] * 4


def test_they_return_when_a_later_backward_makes_nodes(session: Session) -> None:
    inner = perceptron()
    reentrant = False

    def forward(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = checkpoint(inner, x, use_reentrant=True) if reentrant else inner(x)
        return result

    seen = Seen(forward)
    with session:
        ours = innermost()
        seen.backward()
        seen.backward()
        reentrant = True
        for _ in range(4):
            seen.backward()
    assert seen.in_backward == [ours, None, None, ours, ours, ours]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_they_are_there_again_behind_an_exception(session: Session, error: type[BaseException]) -> None:
    def fail() -> None:
        raise error("in the backward")

    seen = Seen()
    with session:
        ours = innermost()
        seen.backward()
        seen.does = fail
        with pytest.raises(error, match="in the backward"):
            seen.backward()
        assert innermost() == ours
        seen.backward()
    assert seen.in_backward == [ours, None, None]


def test_a_session_may_be_left_in_a_backward(session: Session) -> None:
    seen = Seen()
    session.__enter__()
    seen.backward()
    seen.does = lambda: session.__exit__(None, None, None)
    seen.backward()
    assert innermost() is None
    with session:
        ours = innermost()
        seen.backward()
        assert innermost() == ours
    assert innermost() is None


def test_a_session_may_be_entered_in_a_backward(machine: vdnn.VirtualMachine) -> None:
    outer, inner = measuring(machine), measuring(machine)
    seen = Seen()

    def train_inside() -> None:
        with inner, torch.enable_grad():
            Seen().backward()

    with outer:
        ours = innermost()
        seen.backward()
        seen.does = train_inside
        seen.backward()
        assert innermost() == ours
    assert inner.counters.saves > 0


def test_hooks_of_another_session_around_it_see_no_save_of_a_backward(machine: vdnn.VirtualMachine) -> None:
    outer, inner = measuring(machine), measuring(machine)
    seen = Seen()
    with outer, inner:
        ours = innermost()
        for _ in range(3):
            seen.backward()
    assert seen.in_backward == [ours] * 3


def test_hooks_of_the_program_inside_the_session_stay(session: Session) -> None:
    seen = Seen()
    with session:
        seen.backward()
        with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved):
            theirs = innermost()
            seen.backward()
        seen.backward()
    assert seen.in_backward[1:] == [theirs, None]


def test_torch_func_runs_in_a_backward_without_hooks(session: Session) -> None:
    seen, found = Seen(), []

    def differentiate() -> None:
        found.append(torch.func.grad(lambda x: x.square().sum())(torch.ones(3)))

    with session:
        seen.backward()
        seen.does = differentiate
        seen.backward()
    assert found[0].tolist() == [2.0, 2.0, 2.0]


def test_who_patches_torch_inside_a_session_finds_their_own_there(session: Session) -> None:
    calls = []

    def patched(*arguments: Any, **options: Any) -> Any:
        calls.append(arguments)
        return in_session(*arguments, **options)

    seen = Seen()
    try:
        with session:
            in_session = torch.autograd._engine_run_backward
            torch.autograd._engine_run_backward = patched  # type: ignore[assignment]
            seen.backward()
        assert torch.autograd._engine_run_backward is patched
        seen.backward()
        with session:
            seen.backward()
            ours = innermost()
            seen.backward()
        assert torch.autograd._engine_run_backward is patched
    finally:
        torch.autograd._engine_run_backward = _run
    assert len(calls) == 4
    assert seen.in_backward[-1] is None
    assert ours is not None


def test_a_model_with_managed_parameters_keeps_them(machine: vdnn.VirtualMachine) -> None:
    """torch.func in a backward has to know of the session then: its graphs hold parameters themselves."""
    model = nn.Sequential(nn.Linear(16, 16).requires_grad_(False), nn.ReLU(), nn.Linear(16, 16))
    seen = Seen(model)
    with measuring(machine, model=model, parameters="frozen"):
        ours = innermost()
        for _ in range(3):
            seen.backward()
    assert seen.in_backward == [ours] * 3
