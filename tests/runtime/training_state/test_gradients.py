"""With gradients on the host, whoever reads one sees that of plain PyTorch. For bits of trainings see
test_bits_by_way.py."""

from __future__ import annotations

import contextlib
import itertools
import sys
import weakref
from collections.abc import Iterator
from functools import partial
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import vdnn
from tests.runtime.training_state.conftest import Manage
from tests.runtime.training_state.loops import OPTIMIZERS, Net, Training, begin, same
from tests.runtime.training_state.programs import check, every_way
from vdnn.runtime.torch_internals.gradient_reads import native_gradient
from vdnn.runtime.training_state.host_tensor import HostTensor
from vdnn.runtime.training_state.optimizer_state import state_of
from vdnn.runtime.training_state.sliced_step import SlicedStep
from vdnn.runtime.training_state.state_copies import StateCopies

ADAMW = OPTIMIZERS["adamw"]


def backward(training: Training) -> None:
    training.loss().backward()


def away(training: Training) -> list[bool]:
    return [native_gradient(parameter) is None for parameter in training.model.parameters()]


def gradients_of(training: Training) -> list[Any]:
    return [parameter.grad for parameter in training.model.parameters()]


def test_gradients_leave_as_they_are_made_and_return_where_they_are_read(manage: Manage) -> None:
    plain, training = begin(ADAMW), begin(ADAMW)
    with manage(training.optimizer, gradients=True) as session:
        for _ in range(2):
            backward(plain)
            backward(training)
            assert all(away(training))
        first = next(iter(training.model.parameters()))
        assert same(first.grad, next(iter(plain.model.parameters())).grad)
        assert away(training)[0] is False
        assert all(away(training)[1:])
        assert same(gradients_of(plain), gradients_of(training))
        training.optimizer.step()
        assert "gradients of AdamW" in session.report()
    assert "grad" not in vars(nn.Parameter)


@every_way
def test_a_gradient_that_is_held_or_written_stays_what_the_program_sees(way: str, manage: Manage) -> None:
    def program(training: Training) -> Iterator[None]:
        yield
        backward(training)
        held = gradients_of(training)
        backward(training)
        assert all(one is other for one, other in zip(held, gradients_of(training), strict=True))
        training.found += [one.clone() for one in held]
        del held
        for parameter in training.model.parameters():
            parameter.grad = torch.full_like(parameter, 2.0)
        backward(training)
        training.found += [one.clone() for one in gradients_of(training)]
        training.optimizer.zero_grad(set_to_none=False)
        training.found += [one.clone() for one in gradients_of(training)]
        backward(training)
        training.model.zero_grad()
        assert set(gradients_of(training)) == {None}

    check(program, way, manage)


@pytest.mark.parametrize("install", [sys.settrace, sys.setprofile], ids=lambda install: install.__name__)
def test_gradients_leave_under_a_debugger_and_a_profiler(install: Any, manage: Manage) -> None:
    """Up to Python 3.12 a frame whose locals were read holds them a second time."""

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        return trace if frame.f_locals else None

    net = nn.Linear(32, 32)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    held: Any = None
    with manage(optimizer, gradients=True):
        install(trace)
        try:
            net(torch.ones(2, 32)).sum().backward()
            net(torch.ones(2, 32)).sum().backward()
        finally:
            install(None)
        assert all(native_gradient(one) is None for one in net.parameters())
        held = next(net.parameters()).grad
        install(trace)
        try:
            net(torch.ones(2, 32)).sum().backward()
        finally:
            install(None)
        assert native_gradient(next(net.parameters())) is held
        assert torch.equal(held, torch.full((32, 32), 6.0))


@pytest.mark.filterwarnings("ignore:Using backward")
@every_way
def test_hooks_double_backward_and_autograd_grad_see_plain_gradients(way: str, manage: Manage) -> None:
    def program(training: Training) -> Iterator[None]:
        yield
        found, weight = training.found, training.model.get_parameter("inner.weight")
        weight.register_post_accumulate_grad_hook(lambda one: found.append(one.grad.clone()))  # type: ignore[union-attr]
        weight.register_hook(lambda gradient: found.append(None if weight.grad is None else weight.grad.clone()))
        for _ in range(2):
            loss = training.loss()
            loss.backward(retain_graph=True)
            loss.backward()
        found += torch.autograd.grad(training.loss(), [weight])
        training.loss().backward(create_graph=True)
        assert weight.grad is not None
        weight.grad.square().sum().backward()
        found += [one.detach().clone() for one in gradients_of(training)]
        training.optimizer.zero_grad()

    check(program, way, manage)


def test_what_leaves_at_the_end_of_the_session_is_back_on_the_device(manage: Manage) -> None:
    plain, training = begin(ADAMW), begin(ADAMW)
    backward(plain)
    with manage(training.optimizer, gradients=True):
        backward(training)
    assert not any(away(training))
    assert same(gradients_of(plain), gradients_of(training))


def test_zero_grad_drops_what_is_away_without_bringing_it_back(manage: Manage, monkeypatch: pytest.MonkeyPatch) -> None:
    training = begin(ADAMW)
    with manage(training.optimizer, gradients=True):
        backward(training)
        monkeypatch.setattr(StateCopies, "fetch", lambda self, hosts: pytest.fail("fetched"))
        training.optimizer.zero_grad()
        assert gradients_of(training) == [None] * len(away(training))
        assert state_of(training.optimizer).gradients.host_bytes == 0
    assert "zero_grad" not in vars(training.optimizer)


@every_way
def test_a_write_that_counts_no_version_is_not_lost(way: str, manage: Manage) -> None:
    def program(training: Training) -> Iterator[None]:
        yield
        backward(training)
        for parameter in training.model.parameters():
            assert parameter.grad is not None
            parameter.grad.data.clamp_(-0.01, 0.01)
        training.optimizer.step()

    check(program, way, manage)


def test_a_failed_fetch_loses_nothing(manage: Manage, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, training = begin(ADAMW), begin(ADAMW)
    backward(plain)
    with manage(training.optimizer, gradients=True):
        backward(training)
        with monkeypatch.context() as patched:
            patched.setattr(StateCopies, "fetch", lambda self, hosts: (_ for _ in ()).throw(torch.OutOfMemoryError()))
            with pytest.raises(torch.OutOfMemoryError):
                gradients_of(training)
        assert same(gradients_of(plain), gradients_of(training))


def test_bad_input() -> None:
    model = Net()
    with pytest.raises(ValueError, match=r"gradients: whose parameters have them\? Give optimizer= as well\."):
        vdnn.offload(device="sim", gradients=True)
    with pytest.raises(TypeError, match="gradients: expected True, False or None, got 'all'"):
        vdnn.offload(device="sim", optimizer=ADAMW(model.parameters()), gradients="all")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="a step on the CPU takes them"):
        vdnn.offload(device="sim", optimizer=ADAMW(model.parameters()), optimizer_on="cpu", gradients=True)


def test_a_step_fetches_the_gradients_of_the_next_slice_ahead(manage: Manage, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGD without state: gradients alone make slices, here of one matrix of 1 KiB with windows of 2 KiB."""
    order: list[str] = []
    on_device: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most_bytes = 0
    fetch, step = StateCopies.fetch, SlicedStep.step

    def noted_fetch(self: StateCopies, hosts: list[HostTensor]) -> Any:
        nonlocal most_bytes
        order.append("fetch")
        moving = fetch(self, hosts)
        for tensor in moving.tensors:
            on_device.add(tensor)
        most_bytes = max(most_bytes, sum(one.nbytes for one in on_device))
        return moving

    def noted_step(self: SlicedStep, part: Any) -> None:
        order.append("step")
        step(self, part)

    torch.manual_seed(5)
    model = nn.Sequential(*[nn.Linear(16, 16, bias=False) for _ in range(16)])
    training = Training(model, torch.optim.SGD(model.parameters(), lr=0.1), iter(()), [])
    with manage(training.optimizer, gradients=True):
        model(torch.randn(4, 16)).square().mean().backward()
        monkeypatch.setattr(StateCopies, "fetch", noted_fetch)
        monkeypatch.setattr(SlicedStep, "step", noted_step)
        training.optimizer.step()
        assert order == ["fetch", *["fetch", "step"] * 15, "step"]
        assert most_bytes <= 5 << 10  # two slices to come, one that is stepped, and the window that leaves
        assert all(away(training))


def test_each_fetch_of_a_step_may_be_refused_once(manage: Manage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused ahead of the first slice, the step raises and has changed nothing. Refused later, it is fetched again."""
    plain = begin(ADAMW)
    for _ in plain.steps(2):
        backward(plain)
        plain.optimizer.step()
    fetch, raised = StateCopies.fetch, 0
    for refused in itertools.count():
        training, calls = begin(ADAMW), itertools.count()
        with manage(training.optimizer, gradients=True):
            backward(training)
            training.optimizer.step()
            training.optimizer.zero_grad()
            backward(training)

            def refusing(self: StateCopies, hosts: list[HostTensor], calls: Any = calls, refused: int = refused) -> Any:
                if next(calls) == refused:
                    raise torch.OutOfMemoryError("refused")
                return fetch(self, hosts)

            monkeypatch.setattr(StateCopies, "fetch", refusing)
            try:
                training.optimizer.step()
            except torch.OutOfMemoryError:
                raised += 1
                training.optimizer.step()
            monkeypatch.undo()
        assert same(list(plain.model.parameters()), list(training.model.parameters())), f"fetch {refused}"
        if next(calls) <= refused:
            break
    assert raised == 2  # of the first slice: its state, and its gradients
    assert refused > 6


def test_sessions_of_two_optimizers_over_the_same_parameters_take_turns_at_their_gradients(manage: Manage) -> None:
    def run(training: Training, inside: Any) -> list[Any]:
        other = torch.optim.SGD(training.model.parameters(), lr=0.01, momentum=0.9)
        found: list[Any] = []

        def read() -> None:
            found.extend([one.clone() for one in gradients_of(training)])

        with inside(training.optimizer):
            backward(training)
            with inside(other):
                other.step()  # with the gradients of the outer session
                backward(training)
                read()
                training.optimizer.step()
                backward(training)
            read()
            backward(training)
            training.optimizer.step()
            other.step()
            read()
        return [*found, *(one.detach().clone() for one in training.model.parameters())]

    expected = run(begin(ADAMW), lambda _: contextlib.nullcontext())
    assert same(expected, run(begin(ADAMW), partial(manage, gradients=True)))
    assert "grad" not in vars(nn.Parameter)
