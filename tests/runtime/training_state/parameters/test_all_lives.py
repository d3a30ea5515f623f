"""Trained parameters from the begin of a session to after its end, what a program does to them, and what fails."""

from __future__ import annotations

import contextlib
import copy
import io
from typing import Any

import pytest
import torch
from torch import nn

import vdnn
from tests.conftest import open_fake_device
from tests.fake_driver.control import FakeDriver
from tests.runtime.training_state.conftest import Manage, open_session
from tests.runtime.training_state.loops import LOOPS, OPTIMIZERS, Training, begin, same, train
from vdnn.errors import DriverError, VdnnError
from vdnn.runtime.training_state.homes import is_managed
from vdnn.runtime.training_state.parameters.away_parameter import away_of
from vdnn.runtime.training_state.sliced_step import SlicedStep
from vdnn.runtime.training_state.state_copies import StateCopies

ADAMW = OPTIMIZERS["adamw"]
OUT_OF_MEMORY, INVALID_VALUE = 2, 1


def one_step(training: Training) -> None:
    training.loss().backward()
    training.optimizer.step()
    training.optimizer.zero_grad()


def values(training: Training) -> list[torch.Tensor]:
    return [one.detach().clone() for one in training.model.parameters()]


def are_on_host(training: Training) -> list[bool]:
    known = [away_of(one) for one in training.model.parameters()]
    return [away is not None and away.parameter.data_ptr() == away.host.tensor.data_ptr() for away in known]


def test_all_are_on_the_host_between_and_on_the_device_after_a_session(manage: Manage) -> None:
    plain, training = begin(ADAMW), begin(ADAMW)
    objects = [id(one) for one in training.model.parameters()]
    with manage(training.optimizer, model=training.model, parameters="all") as session:
        for _ in range(3):
            one_step(plain)
            one_step(training)
            assert all(are_on_host(training))
            assert same(values(plain), values(training))
        assert "parameters: 1.94 KiB on the host" in session.report()
    assert [id(one) for one in training.model.parameters()] == objects
    assert not any(map(is_managed, training.model.parameters()))
    one_step(plain)
    one_step(training)
    assert same(values(plain), values(training))
    assert not any(one._backward_hooks or one._post_accumulate_grad_hooks for one in training.model.parameters())


def test_a_saved_training_goes_on_in_plain_torch_and_back(manage: Manage) -> None:
    plain, first, second = begin(ADAMW), begin(ADAMW), begin(ADAMW)

    def saved(training: Training) -> io.BytesIO:
        buffer = io.BytesIO()
        torch.save((training.model.state_dict(), training.optimizer.state_dict()), buffer)
        buffer.seek(0)
        return buffer

    def load(training: Training, buffer: io.BytesIO) -> None:
        model, optimizer = torch.load(buffer)
        training.model.load_state_dict(model)
        training.optimizer.load_state_dict(optimizer)

    for _ in range(9):
        one_step(plain)
    with manage(first.optimizer, model=first.model, parameters="all"):
        for _ in range(3):
            one_step(first)
        load(second, saved(first))
    second.batches = first.batches
    for _ in range(3):
        one_step(second)
    with manage(first.optimizer, model=first.model, parameters="all"):
        load(first, saved(second))
        for _ in range(3):
            one_step(first)
    assert same(values(plain), values(first))


def test_copies_parametrizations_and_functional_calls_have_the_bits(manage: Manage) -> None:
    def run(training: Training, inside: Any) -> list[Any]:
        nn.utils.parametrizations.weight_norm(training.model.get_submodule("between"))
        nn.utils.parametrizations.spectral_norm(training.model.get_submodule("last"))
        training.optimizer = ADAMW(training.model.parameters())
        found: list[Any] = []
        with inside(training):
            for _ in range(4):
                one_step(training)
                copied = copy.deepcopy(training.model)
                x = torch.ones(2, 8)
                found.append(copied(x).detach())
                given = dict(training.model.named_parameters())
                found.append(torch.func.functional_call(training.model, given, (x,)).detach())
        return [*found, *values(training)]

    managed = lambda one: manage(one.optimizer, model=one.model, parameters="all")  # noqa: E731
    assert same(run(begin(ADAMW), lambda _: contextlib.nullcontext()), run(begin(ADAMW), managed))


def test_what_the_program_moves_is_refused_and_nothing_is_lost(manage: Manage) -> None:
    training = begin(ADAMW)
    with manage(training.optimizer, model=training.model, parameters="all"):
        one_step(training)
        weight = training.model.get_parameter("inner.weight")
        expected = weight.detach().double()
        weight.data = weight.data.double()
        with pytest.raises(VdnnError, match=r"parameter inner\.weight was moved or replaced"):
            training.loss()
        assert torch.equal(weight, expected)
    assert torch.equal(weight, expected)


def test_bad_input() -> None:
    training = begin(ADAMW)
    with pytest.raises(ValueError, match="parameters: which optimizer trains all of them"):
        vdnn.offload(device="sim", model=training.model, parameters="all")


def test_a_parameter_without_an_optimizer_stays_and_is_named(manage: Manage) -> None:
    training = begin(lambda given: ADAMW(list(given)[1:]))
    with manage(training.optimizer, model=training.model, parameters="all") as session:
        one_step(training)
        assert are_on_host(training) == [False, *[True] * (len(are_on_host(training)) - 1)]
        assert "parameter inner.weight stays on the device: it is trained, and no optimizer" in session.report()


def test_exceptions_in_forward_backward_and_closures_leave_a_training_that_goes_on(manage: Manage) -> None:
    def run(training: Training, inside: Any) -> list[torch.Tensor]:
        last = training.model.get_submodule("last")

        def fails(*given: object) -> None:
            raise ZeroDivisionError

        with inside:
            one_step(training)
            for register in (last.register_forward_pre_hook, last.register_full_backward_hook):
                handle = register(fails)
                with pytest.raises(ZeroDivisionError):
                    training.loss().backward()
                handle.remove()
                training.optimizer.zero_grad()
            with pytest.raises(ZeroDivisionError):
                training.optimizer.step(fails)  # type: ignore[arg-type]
            one_step(training)
            return values(training)

    plain, training = begin(ADAMW), begin(ADAMW)
    inside = manage(training.optimizer, model=training.model, parameters="all")
    assert same(run(plain, contextlib.nullcontext()), run(training, inside))


def test_a_step_that_stops_between_slices_says_so(manage: Manage, monkeypatch: pytest.MonkeyPatch) -> None:
    training, step, calls = begin(ADAMW), SlicedStep.step, []

    def failing(self: SlicedStep, part: Any) -> None:
        calls.append(part)
        if len(calls) == 2:
            raise ArithmeticError("no")
        step(self, part)

    with manage(training.optimizer, model=training.model, parameters="all"):
        training.loss().backward()
        monkeypatch.setattr(SlicedStep, "step", failing)
        with pytest.raises(VdnnError, match="stopped after"):
            training.optimizer.step()
        assert all(are_on_host(training))
        assert all(bool(one.isfinite().all()) for one in values(training))


def test_each_refused_copy_to_the_host_leaves_the_bits(manage: Manage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused behind a step, the copy on the device is the parameter from then on."""
    expected = train(ADAMW, LOOPS["plain"])
    leave = StateCopies.leave
    for every in (2, 3, 5):
        calls: list[int] = []

        def refusing(self: StateCopies, tensors: Any, hosts: Any, calls: Any = calls, every: int = every) -> bool:
            calls.append(0)
            return len(calls) % every != 0 and leave(self, tensors, hosts)

        monkeypatch.setattr(StateCopies, "leave", refusing)

        def inside(managed: Any, model: nn.Module) -> Any:
            return manage(managed, model=model, parameters="all")

        assert same(expected, train(ADAMW, LOOPS["plain"], inside, with_model=True))


@pytest.mark.slow
@pytest.mark.drawn(of=4)
@pytest.mark.parametrize("part", range(4))
def test_each_call_of_the_driver_refused_in_turn_leaves_the_bits(part: int, fake_driver: FakeDriver) -> None:
    def run(fails: int | None, training: Training) -> list[str]:
        device = open_fake_device(fake_driver)
        session = open_session(device, training.optimizer, model=training.model, parameters="all")
        with contextlib.closing(session), session:
            one_step(training)
            before = len(fake_driver.calls())
            if fails is not None:
                fake_driver.fail_nth(fails, INVALID_VALUE)
            one_step(training)
            calls = fake_driver.calls()[before:]
            while fake_driver.faults_pending:  # this run made fewer calls
                with contextlib.suppress(DriverError):
                    device.synchronize(device.record(device.adopt_stream(0)))
        device.close()
        return calls

    plain = begin(ADAMW)
    for _ in range(2):
        one_step(plain)
    calls = run(None, begin(ADAMW))
    refused = [nth for nth, call in enumerate(calls, 1) if not call.startswith("cuCtx")]  # those belong to the core
    for nth in refused[:: max(1, len(refused) // 60)][part::4]:
        training = begin(ADAMW)
        run(nth, training)
        assert same(values(plain), values(training)), calls[nth - 1]


@pytest.mark.slow
def test_each_host_allocation_refused_in_turn_leaves_the_bits(fake_driver: FakeDriver) -> None:
    expected = train(ADAMW, LOOPS["accumulation"])
    for nth in range(1, 8):
        device = open_fake_device(fake_driver)
        fake_driver.fail_call("cuMemHostRegister", nth, OUT_OF_MEMORY)

        @contextlib.contextmanager
        def inside(managed: Any, model: nn.Module, device: Any = device) -> Any:
            with contextlib.closing(open_session(device, managed, model=model, parameters="all")) as session, session:
                yield

        assert same(expected, train(ADAMW, LOOPS["accumulation"], inside, with_model=True))
        fake_driver.reset()
        device.close()


@pytest.mark.slow
def test_many_steps_do_not_grow(manage: Manage) -> None:
    training, counts = begin(ADAMW), []
    with manage(training.optimizer, model=training.model, parameters="all") as session:
        for step in range(300):
            one_step(training)
            training.found.clear()
            if step in (2, 299):
                states = [one.state_bytes for one in session._engine.transports.opened()]
                counts.append((session.host_bytes, states))
    assert counts[0] == counts[1]
