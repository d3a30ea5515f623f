"""The public names, through `import vdnn` alone: offload around code and on functions, keep, paused; and what they
yield.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import vdnn

MARKED = "marked with vdnn.keep"
PAUSED = "saved under vdnn.paused"


@pytest.fixture
def session() -> Iterator[vdnn.Session]:
    made = vdnn.offload(device="sim", min_bytes=0, limits=vdnn.Limits(offload_window="1KiB"))
    yield made
    made.close()


def network() -> nn.Sequential:
    """Each Linear saves its input. The tanh before it saves the same storage, and the square saves the last result."""
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())


def train(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad(set_to_none=True)
    model(x).square().sum().backward()
    gradients = [weight.grad for weight in model.parameters()]
    return [gradient for gradient in gradients if gradient is not None]


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return len(left) == len(right) > 0 and all(map(torch.equal, left, right))


def moved_by(session: vdnn.Session, step: Callable[[], object]) -> int:
    before = session.counters.storages
    step()
    return session.counters.storages - before


def test_every_name_is_there_and_the_runtimes_are_callable() -> None:
    for name in vdnn.__all__:
        assert getattr(vdnn, name) is not None
    assert all(callable(getattr(vdnn, name)) for name in ("keep", "offload", "paused", "save_on_cpu"))
    assert isinstance(vdnn.offload(device="sim"), vdnn.Session)


def test_a_session_yields_itself_and_what_it_knows(session: vdnn.Session) -> None:
    model, x = network(), torch.randn(4, 8)
    plain = train(model, x)
    with session as entered:
        assert entered is session
        assert same(train(model, x), plain)
        session.step()
    assert session.num_steps == 1
    assert session.counters.storages == 3  # x, the two results of tanh
    assert "offloaded 3 storages" in session.report()
    assert (session.plan, session.recording, session.timeline) == (None, None, None)  # without measure=True


def test_on_a_function_it_holds_for_each_call_and_not_outside() -> None:
    session = vdnn.offload(device="sim", min_bytes=0)
    model, x = network(), torch.randn(4, 8)
    plain = train(model, x)

    @session
    def step(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
        """Runs one training step."""
        return train(model, x)

    assert step.__name__ == "step"
    assert step.__doc__ == "Runs one training step."
    for calls in range(1, 4):
        assert same(step(model, x=x), plain)
        assert session.counters.storages == 3 * calls
    train(model, x)
    assert session.counters.storages == 9
    session.close()


def test_on_a_function_it_may_be_written_out_and_the_function_may_call_itself() -> None:
    model, x = network(), torch.randn(4, 8)
    plain = train(model, x)

    @vdnn.offload(device="sim", min_bytes=0)
    def step(again: int) -> list[torch.Tensor]:
        gradients = train(model, x)
        return step(again - 1) if again else gradients

    assert same(step(2), plain)


def test_on_a_method_and_through_an_exception(session: vdnn.Session) -> None:
    class Trainer:
        def __init__(self) -> None:
            self.model = network()

        @session
        def step(self, x: torch.Tensor) -> list[torch.Tensor]:
            return train(self.model, x)

    trainer, x = Trainer(), torch.randn(4, 8)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        trainer.step(torch.randn(4, 7))
    assert moved_by(session, lambda: train(trainer.model, x)) == 0, "left by the exception"
    assert moved_by(session, lambda: trainer.step(x)) == 3


def test_keep_returns_what_it_was_given(session: vdnn.Session) -> None:
    x, model = torch.randn(4, 8), network()
    assert vdnn.keep(x) is x
    assert vdnn.keep(model) is model


def test_a_kept_tensor_stays_with_all_its_views(session: vdnn.Session) -> None:
    weight = torch.ones(8, 8, requires_grad=True)
    large = vdnn.keep(torch.randn(32, 8))
    with session:
        loss = (large[:8] * weight).sum() + (large[8:16].t() * weight).sum() + (torch.randn(8, 8) * weight).sum()
    loss.backward()
    assert session.counters.storages == 1
    assert f"kept 2 saves, 512 B: {MARKED}" in session.report()


@pytest.mark.parametrize("when", ["before the session", "inside", "on another thread"])
def test_a_kept_module_keeps_what_is_saved_in_its_forward(session: vdnn.Session, when: str) -> None:
    model, x = network(), torch.randn(4, 8)
    plain = train(model, x)
    if when == "before the session":
        vdnn.keep(model[2])
    with session:
        if when == "inside":
            vdnn.keep(model[2])
        if when == "on another thread":
            thread = threading.Thread(target=vdnn.keep, args=(model[2],))
            thread.start()
            thread.join()
        assert same(train(model, x), plain)
    # The second Linear saves its input, which the first tanh has already saved, and its weight.
    assert MARKED in session.report()
    assert session.counters.storages == 3


def test_a_kept_module_does_not_keep_others(session: vdnn.Session) -> None:
    vdnn.keep(network())
    with session:
        train(network(), torch.randn(4, 8))
    assert MARKED not in session.report()


def test_without_a_session_paused_does_nothing() -> None:
    model, x = network(), torch.randn(4, 8)
    plain = train(model, x)
    with vdnn.paused():
        assert same(train(model, x), plain)


def test_what_is_saved_while_paused_stays_and_what_follows_moves(session: vdnn.Session) -> None:
    model, x = network(), torch.randn(4, 8)
    plain = train(model, x)
    with session:
        with vdnn.paused():
            with vdnn.paused():
                assert same(train(model, x), plain)
            assert same(train(model, x), plain), "still paused"
        assert session.counters.storages == 0
        assert same(train(model, x), plain)
        assert session.counters.storages == 3
    assert PAUSED in session.report()


def test_paused_goes_on_a_function_too_and_ends_with_an_exception(session: vdnn.Session) -> None:
    paused_train = vdnn.paused()(train)
    model, x = network(), torch.randn(4, 8)
    with session:
        assert moved_by(session, lambda: paused_train(model, x)) == 0
        with pytest.raises(ZeroDivisionError), vdnn.paused():
            _ = 1 // 0
        assert moved_by(session, lambda: train(model, x)) == 3


def test_paused_pauses_its_own_thread_only(session: vdnn.Session) -> None:
    model, x = network(), torch.randn(4, 8)

    def elsewhere() -> None:
        with session:
            train(model, x)

    with session, vdnn.paused():
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert session.counters.storages == 3
        assert moved_by(session, lambda: train(model, x)) == 0


@pytest.mark.parametrize(("budget", "widest"), [(None, 256 << 20), (16 << 30, 256 << 20), (80 << 20, 10 << 20)])
def test_a_window_is_an_eighth_of_a_small_budget_unless_it_is_given(budget: int | None, widest: int) -> None:
    assert vdnn.Limits().windows(budget) == (widest, widest)
    assert vdnn.Limits(reload_window="1KiB").windows(budget) == (widest, 1024)
