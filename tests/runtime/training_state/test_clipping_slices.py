"""Clipping and unscaling leave gradients on the host: bits of plain PyTorch, a slice on the device at one time."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_

from tests.runtime.training_state.conftest import Manage
from tests.runtime.training_state.loops import OPTIMIZERS, Training, begin, same
from vdnn.runtime.torch_internals.gradient_reads import native_gradient
from vdnn.runtime.training_state.state_copies import StateCopies

ADAMW = OPTIMIZERS["adamw"]
Pass = Callable[[Training], Any]


def parameters_of(training: Training) -> list[torch.Tensor]:
    return list(training.model.parameters())


def away(training: Training) -> list[bool]:
    return [native_gradient(parameter) is None for parameter in training.model.parameters()]


def gradients_of(training: Training) -> list[Any]:
    return [parameter.grad for parameter in training.model.parameters()]


def unscaled(training: Training, scale: float = 8.0) -> Any:
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    scaler.scale(torch.ones(()))
    scaler.unscale_(training.optimizer)
    return sum(scaler._found_inf_per_device(training.optimizer).values())


PASSES: dict[str, Pass] = {
    "norm": lambda one: clip_grad_norm_(one.model.parameters(), 0.1),
    "norm-infinite": lambda one: clip_grad_norm_(parameters_of(one), 0.1, float("inf")),
    "norm-1": lambda one: clip_grad_norm_(parameters_of(one), 0.1, 1, foreach=False),
    "norm-3-foreach": lambda one: clip_grad_norm_(parameters_of(one), 0.1, 3.0, True, foreach=True),
    "norm-of-some-twice": lambda one: clip_grad_norm_(parameters_of(one)[:2] * 2, 0.1),
    "norm-of-one": lambda one: clip_grad_norm_(parameters_of(one)[0], 0.1),
    "norm-that-clips-nothing": lambda one: clip_grad_norm_(parameters_of(one), 1e6),
    "with-norm": lambda one: clip_grads_with_norm_(one.model.parameters(), 0.1, torch.tensor(0.7)),
    "value": lambda one: clip_grad_value_(one.model.parameters(), 0.01),
    "value-foreach": lambda one: clip_grad_value_(one.model.parameters(), 0.01, foreach=True),
    "unscale": unscaled,
}


@pytest.mark.parametrize("name", PASSES)
def test_a_pass_has_the_bits_of_plain_pytorch_and_leaves_gradients_away(name: str, manage: Manage) -> None:
    plain, training = begin(ADAMW), begin(ADAMW)
    with manage(training.optimizer, gradients=True):
        for one in (plain, training):
            one.loss().backward()
        expected, found = PASSES[name](plain), PASSES[name](training)
        assert all(away(training))
        assert expected is found is None or same([expected], [found])
        assert same(gradients_of(plain), gradients_of(training))


@pytest.mark.parametrize("first", PASSES)
def test_passes_follow_each_other_and_backward_passes(first: str, manage: Manage) -> None:
    plain, training = begin(ADAMW), begin(ADAMW)
    with manage(training.optimizer, gradients=True):
        for one in (plain, training):
            one.loss().backward()
            PASSES[first](one)
            PASSES["unscale"](one)
            one.loss().backward()
            one.found += [torch.as_tensor(PASSES["norm"](one)).clone()]
            held = parameters_of(one)[1].grad
            PASSES["value"](one)
            assert held is parameters_of(one)[1].grad
            one.optimizer.step()
        assert same(gradients_of(plain), gradients_of(training))
        assert same(plain.found + parameters_of(plain), training.found + parameters_of(training))


def test_the_norm_that_the_program_gets_is_its_own(manage: Manage) -> None:
    plain, training = begin(ADAMW), begin(ADAMW)
    with manage(training.optimizer, gradients=True):
        for one in (plain, training):
            one.loss().backward()
            clip_grad_norm_(one.model.parameters(), 0.1).fill_(1e9)
        assert same(gradients_of(plain), gradients_of(training))


def test_a_norm_that_is_not_finite_is_refused_as_torch_does_and_changes_nothing(manage: Manage) -> None:
    plain, training = begin(ADAMW), begin(ADAMW)
    messages = []
    with manage(training.optimizer, gradients=True):
        for one in (plain, training):
            one.loss().backward()
            parameters_of(one)[0].grad.fill_(float("inf"))  # type: ignore[union-attr]
            with pytest.raises(RuntimeError) as refused:
                clip_grad_norm_(one.model.parameters(), 0.1, error_if_nonfinite=True)
            messages.append(str(refused.value))
        assert messages[0] == messages[1]
        assert same(gradients_of(plain), gradients_of(training))


@pytest.mark.parametrize("name", ["norm", "value", "unscale"])
def test_a_fetch_that_fails_changes_nothing(name: str, manage: Manage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each fetch of the pass in turn. A pass by value fetches nothing."""
    plain = begin(ADAMW)
    plain.loss().backward()
    fetch = StateCopies.fetch
    for failing in itertools.count():
        training = begin(ADAMW)
        with manage(training.optimizer, gradients=True):
            training.loss().backward()
            calls = itertools.count()

            def refusing(self: StateCopies, hosts: Any, calls: Any = calls, failing: int = failing) -> Any:
                if next(calls) >= failing:
                    raise torch.OutOfMemoryError("refused")
                return fetch(self, hosts)

            monkeypatch.setattr(StateCopies, "fetch", refusing)
            try:
                PASSES[name](training)
            except torch.OutOfMemoryError:
                monkeypatch.setattr(StateCopies, "fetch", fetch)
                assert same(gradients_of(plain), gradients_of(training))
                continue
            finally:
                monkeypatch.setattr(StateCopies, "fetch", fetch)
            PASSES[name](plain)
            assert same(gradients_of(plain), gradients_of(training))
            break
    assert failing > 1 if name != "value" else failing == 0


def test_gradients_of_two_optimizers_and_some_on_the_device_are_clipped_together(manage: Manage) -> None:
    def run(inside: Any) -> list[Any]:
        torch.manual_seed(3)
        model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
        model[2].to(torch.bfloat16)
        optimizers = [torch.optim.AdamW(model[:1].parameters()), torch.optim.SGD(model[1].parameters(), lr=0.1)]
        with inside(optimizers):
            found = []
            for _ in range(3):
                model[2](model[:2](torch.randn(4, 8)).bfloat16()).float().square().sum().backward()
                found.append(clip_grad_norm_(model.parameters(), 0.5))
                found += [parameter.grad.clone() for parameter in model[2].parameters()]  # type: ignore[union-attr]
                for one in optimizers:
                    one.step()
                model.zero_grad()
        return [*found, *(one.detach().float() for one in model.parameters())]

    class Plain:
        def __init__(self, _: object) -> None: ...
        def __enter__(self) -> None: ...
        def __exit__(self, *_: object) -> None: ...

    assert same(run(Plain), run(partial(manage, gradients=True)))


def test_torch_has_its_own_functions_again(manage: Manage) -> None:
    functions = (clip_grad_norm_, clip_grads_with_norm_, clip_grad_value_)

    def own() -> list[Any]:
        return [one.__closure__[0].cell_contents for one in functions] + [torch.amp.GradScaler._unscale_grads_]

    before, training, other = own(), begin(ADAMW), begin(ADAMW)
    with manage(training.optimizer, gradients=True):
        with manage(other.optimizer, gradients=True):
            assert not any(one is two for one, two in zip(own(), before, strict=True))
        assert not any(one is two for one, two in zip(own(), before, strict=True))
    assert all(one is two for one, two in zip(own(), before, strict=True))


@pytest.mark.parametrize("name", ["norm", "norm-1", "value", "unscale"])
def test_two_slices_are_on_the_device_at_one_time_and_nothing_is_copied_out(
    name: str, manage: Manage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """16 gradients of 1 KiB, with windows of 2 KiB."""
    on_device: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most_bytes, fetched_bytes = 0, 0
    fetch = StateCopies.fetch

    def counted(self: StateCopies, hosts: Any) -> Any:
        nonlocal most_bytes, fetched_bytes
        moving = fetch(self, hosts)
        for tensor in moving.tensors:
            on_device.add(tensor)
        most_bytes = max(most_bytes, sum(one.nbytes for one in on_device))
        fetched_bytes += moving.nbytes
        return moving

    torch.manual_seed(5)
    model = nn.Sequential(*[nn.Linear(16, 16, bias=False) for _ in range(16)])
    training = Training(model, torch.optim.SGD(model.parameters(), lr=0.1), iter(()), [])
    with manage(training.optimizer, gradients=True):
        model(torch.randn(4, 16)).square().mean().backward()
        monkeypatch.setattr(StateCopies, "fetch", counted)
        monkeypatch.setattr(StateCopies, "leave", lambda *_: pytest.fail("copied out"))
        PASSES[name](training)
        monkeypatch.undo()
        assert all(away(training))
    assert (most_bytes, fetched_bytes) == ((0, 0) if name == "value" else (2 << 10, 16 << 10))


def test_a_loop_that_reads_and_writes_each_gradient_brings_a_window_back(manage: Manage) -> None:
    """16 gradients of 1 KiB, and half a window of 1 KiB. A gradient that is held stays, whatever is read."""

    def run(one: Training, seen: list[int]) -> list[Any]:
        torch.manual_seed(6)
        one.model(torch.randn(4, 16)).square().mean().backward()
        for parameter in parameters_of(one):
            if parameter.grad is not None:
                parameter.grad.data.mul_(0.5)
                seen.append(away(one).count(False))
        last = parameters_of(one)[-1]
        one.model(torch.randn(4, 16)).square().mean().backward()  # what was read last is away again
        assert last.grad is not None
        held = parameters_of(one)[3].grad
        found = [parameter.grad.norm() for parameter in parameters_of(one)]  # type: ignore[union-attr]
        assert held is parameters_of(one)[3].grad
        seen.append(away(one).count(False))
        del held
        found.append(clip_grad_norm_([one for one in parameters_of(one) if one.grad is not None], 0.01))
        seen.append(away(one).count(False))
        one.optimizer.step()
        return found + parameters_of(one)

    def make() -> Training:
        torch.manual_seed(5)
        model = nn.Sequential(*[nn.Linear(16, 16, bias=False) for _ in range(16)])
        return Training(model, torch.optim.SGD(model.parameters(), lr=0.1), iter(()), [])

    expected, training = run(make(), []), make()
    seen: list[int] = []
    with manage(training.optimizer, gradients=True):
        assert same(expected, run(training, seen))
    assert seen == [*[1] * 16, 2, 2]
