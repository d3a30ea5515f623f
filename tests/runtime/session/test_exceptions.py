"""An exception at any hook call of a step: it reaches the user, the next step is right, and nothing stays allocated."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from tests.runtime.conftest import EITHER_WAY
from tests.runtime.rigs.lives import one_backward
from tests.runtime.rigs.networks import images, perceptron, small_resnet
from tests.runtime.rigs.side_by_side import assert_nothing_alive, differences, outcome
from vdnn.runtime.session.session import Session

pytestmark = EITHER_WAY


class Injected(Exception):
    """The exception that the tests raise."""


def empty_the_engines_queue() -> None:
    """Runs a backward, because a backward that fails in one branch leaves the ready nodes of other branches in the
    engine's queue of this thread. They keep the whole graph alive until the next backward. Torch does this with any
    hooks and with none."""
    torch.ones(1, requires_grad=True).sum().backward()


class FaultyHook:
    """A hook of a session that may raise. It equals the hook, because recipes know their own saves by it."""

    def __init__(self, hook: Callable[[Any], Any], fault: HookFault) -> None:
        self._hook = hook
        self._fault = fault

    def __eq__(self, other: object) -> bool:
        return other == self._hook

    __hash__ = None  # type: ignore[assignment]

    def __call__(self, argument: Any) -> Any:
        fault = self._fault
        fault.calls += 1
        fails = fault.calls == fault.raise_at
        if fails and fault.before:
            raise Injected
        result = self._hook(argument)
        if fails:
            raise Injected
        return result


class HookFault:
    """Counts the calls of the hooks that a session installs, and raises at one of them: before its work or after it."""

    def __init__(self, session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = 0
        self.raise_at = 0
        self.before = True
        packer = session._engine.packer
        for name in ("pack_hook", "unpack_hook"):
            monkeypatch.setattr(packer, name, FaultyHook(getattr(packer, name), self))

    def arm(self, raise_at: int, before: bool) -> None:
        self.calls, self.raise_at, self.before = 0, raise_at, before


@pytest.mark.slow
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_an_exception_at_every_hook_call_leaves_the_next_step_working(
    session: Session, monkeypatch: pytest.MonkeyPatch, before: bool
) -> None:
    model, x = small_resnet(), images()

    step = partial(one_backward, model, x)
    plain = outcome(step, [model])
    fault = HookFault(session, monkeypatch)
    with session:
        assert differences(plain, outcome(step, [model])) == []
    calls = fault.calls
    assert calls > 70, "a step of this network has more than 70 saves and uses"
    assert bool(session.counters.discarded) is (session.policy.name == "recompute-all")
    for raise_at in range(1, calls + 1):
        fault.arm(raise_at, before)
        with pytest.raises(Injected), session:
            outcome(step, [model])
        empty_the_engines_queue()
        assert_nothing_alive(session)
        if raise_at % 5 == 0 or raise_at > calls - 3:
            with session:
                assert differences(plain, outcome(step, [model])) == [], f"after an exception at hook call {raise_at}"


def test_an_exception_caught_inside_the_session_leaves_the_next_step_working(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = small_resnet(), images()

    step = partial(one_backward, model, x)
    plain = outcome(step, [model])
    fault = HookFault(session, monkeypatch)
    with session:
        outcome(step, [model])
        for raise_at in range(2, fault.calls, 7):
            fault.arm(raise_at, before=True)
            with pytest.raises(Injected):
                outcome(step, [model])
            assert differences(plain, outcome(step, [model])) == []
    assert_nothing_alive(session)


class FailsInForward(nn.Module):
    """Raises in its forward, after a layer that has saved."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = perceptron()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.inner(x)
        raise Injected


def test_an_exception_in_a_module_does_not_confuse_which_module_runs(session: Session) -> None:
    model, failing, x = small_resnet(), FailsInForward(), torch.randn(2, 16)
    with session:
        for _ in range(3):
            with pytest.raises(Injected):
                failing(x)
            assert session._engine.modules.innermost() is None
        model(images())
        assert session._engine.modules.innermost() is None
    assert_nothing_alive(session)


def test_an_exception_in_a_backward_of_the_user_leaves_the_graph_usable(session: Session) -> None:
    model, x = perceptron(depth=4), torch.randn(4, 16)
    angry = [True]

    def maybe(gradient: torch.Tensor) -> None:
        if angry[0]:
            raise Injected

    def step() -> torch.Tensor:
        hidden = model[:4](x)
        hidden.register_hook(maybe)
        loss = model[4:](hidden).square().sum()
        if angry[0]:
            with pytest.raises(Injected):
                loss.backward(retain_graph=True)
            model.zero_grad(set_to_none=True)
            angry[0] = False
        loss.backward()
        return loss  # type: ignore[no-any-return]

    plain = outcome(step, [model])
    angry[0] = True
    with session:
        assert differences(plain, outcome(step, [model])) == []
    assert_nothing_alive(session)
