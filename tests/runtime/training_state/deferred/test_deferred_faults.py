"""Faults while steps wait: afterwards model and optimizer are as after the step, or an error says what to load."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import vdnn
from tests.conftest import open_fake_device
from tests.fake_driver.control import FakeDriver
from tests.runtime.training_state.conftest import Manage, on_host, open_session, reach_fault
from tests.runtime.training_state.loops import OPTIMIZERS, Training, begin, same
from tests.runtime.training_state.test_lives import expected, one_step, outcome, state_bytes
from vdnn.errors import VdnnError
from vdnn.runtime.session.session import Session
from vdnn.runtime.torch_internals.parameter_guard import GuardedParameter
from vdnn.runtime.training_state.host_tensor import HostTensor
from vdnn.runtime.training_state.sliced_step import SlicedStep
from vdnn.runtime.training_state.slices import Slice
from vdnn.runtime.training_state.state_copies import Moving, StateCopies

ADAMW = OPTIMIZERS["adamw"]
OUT_OF_MEMORY, INVALID_VALUE = 2, 1


@contextlib.contextmanager
def on_the_fake_driver(driver: FakeDriver, training: Training, *, gradients: bool = False) -> Iterator[Session]:
    device = open_fake_device(driver)
    try:
        session = open_session(device, training.optimizer, optimizer_step="deferred", gradients=gradients)
        with contextlib.closing(session), session:
            yield session
    finally:
        device.close()


def evaluate(training: Training) -> None:
    """Steps what waits. No graph, so that no activation leaves."""
    with torch.no_grad():
        training.loss()


def waiting(training: Training) -> int:
    return sum(type(one) is GuardedParameter for one in training.model.parameters())


def evaluated(steps: int) -> list[Any]:
    training = begin(ADAMW)
    for _ in range(steps):
        one_step(training)
        evaluate(training)
    return outcome(training)


with_gradients = pytest.mark.parametrize("gradients", [False, True], ids=["", "gradients"])
EVERY_THIRD = [1, pytest.param(2, marks=pytest.mark.full), pytest.param(3, marks=pytest.mark.full)]


@pytest.mark.parametrize("first", EVERY_THIRD)
def test_each_call_of_a_deferred_step_refused_in_turn_changes_no_bit(first: int, fake_driver: FakeDriver) -> None:
    training = begin(ADAMW)
    with on_the_fake_driver(fake_driver, training):
        one_step(training)
        evaluate(training)
        one_step(training)
        before = fake_driver.call_count
        evaluate(training)
        calls = fake_driver.calls()[before:]
    assert sum("Memcpy" in call for call in calls) == 40  # 10 parameters, 2 tensors each, both ways
    wanted = evaluated(3)
    for nth in range(first, len(calls) + 1, 3):
        training = begin(ADAMW)
        with on_the_fake_driver(fake_driver, training):
            one_step(training)
            evaluate(training)
            one_step(training)
            fake_driver.fail_nth(nth, INVALID_VALUE)
            evaluate(training)
            reach_fault(fake_driver, nth, calls)
            one_step(training)
            evaluate(training)
            assert same(outcome(training), wanted), (nth, calls[nth - 1])
        assert same(outcome(training), wanted), (nth, calls[nth - 1])


@pytest.mark.full
@with_gradients
@pytest.mark.parametrize("first", [1, 2, 3])
def test_each_call_of_a_training_refused_in_turn_changes_no_bit(
    first: int, gradients: bool, fake_driver: FakeDriver
) -> None:
    """All calls of the second round: forward with the deferred step, backward, and the call of the step."""
    training = begin(ADAMW)
    with on_the_fake_driver(fake_driver, training, gradients=gradients):
        one_step(training)
        before = fake_driver.call_count
        one_step(training)
        calls = fake_driver.calls()[before:]
    wanted = expected(4)
    for nth in range(first, len(calls) + 1, 3):
        training = begin(ADAMW)
        with on_the_fake_driver(fake_driver, training, gradients=gradients):
            one_step(training)
            fake_driver.fail_nth(nth, INVALID_VALUE)
            one_step(training)
            reach_fault(fake_driver, nth, calls)
            for _ in range(2):
                one_step(training)
        assert same(outcome(training), wanted), (nth, calls[nth - 1])


@with_gradients
def test_each_host_allocation_refused_in_turn_leaves_its_state_on_the_device(
    gradients: bool, fake_driver: FakeDriver
) -> None:
    wanted, refused = expected(2), 0
    for nth in range(1, 100):
        training = begin(ADAMW)
        with on_the_fake_driver(fake_driver, training, gradients=gradients):
            fake_driver.fail_call("cuMemHostRegister", nth, OUT_OF_MEMORY)
            one_step(training)
            one_step(training)
            pending = fake_driver.faults_pending
            assert same(outcome(training), wanted), nth
            assert on_host(training.optimizer) <= state_bytes(training)
        fake_driver.reset()
        if pending:
            break
        refused += 1
    assert refused >= 1


def test_an_exception_in_the_forward_leaves_the_rest_to_wait(manage: Manage) -> None:
    training = begin(ADAMW)
    with manage(training.optimizer, optimizer_step="deferred"):
        one_step(training)
        one_step(training)
        assert waiting(training) == 10

        def fail(module: torch.nn.Module, args: object) -> None:
            raise ArithmeticError("no")

        handle = training.model.between.register_forward_pre_hook(fail)  # type: ignore[union-attr, operator]
        with pytest.raises(ArithmeticError):
            training.model(torch.ones(2, 8))
        handle.remove()
        assert 0 < waiting(training) < 10
        assert same(outcome(training), expected(2))
        one_step(training)
    assert same(outcome(training), expected(3))


@with_gradients
@pytest.mark.parametrize("where", ["forward", "exit"])
def test_a_slice_that_fails_names_what_to_load(
    where: str, gradients: bool, manage: Manage, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = begin(ADAMW)
    own_step = SlicedStep.step
    model: Any = training.model

    def failing(sliced: SlicedStep, part: Slice) -> None:
        if any(one is model.last.weight for one in part.all_parameters()):
            raise ArithmeticError("no")
        own_step(sliced, part)

    session = manage(training.optimizer, optimizer_step="deferred", gradients=gradients)
    said = r"the step of AdamW stopped after \d of 10 parameters: no. Model and optimizer are between two steps"
    with contextlib.ExitStack() as stack:
        if where == "exit":
            stack.enter_context(pytest.raises(VdnnError, match=said))
        with session:
            one_step(training)
            one_step(training)
            monkeypatch.setattr(SlicedStep, "step", failing)
            if where == "forward":
                with pytest.raises(VdnnError, match=said):
                    training.loss()
                assert waiting(training) == 0
                assert [len(group["params"]) for group in training.optimizer.param_groups] == [10]
                monkeypatch.undo()
                one_step(training)  # it goes on, as after a step that failed in plain PyTorch
    assert waiting(training) == 0
    assert "state" not in vars(torch.optim.Optimizer)


def test_gradients_are_the_programs_again_after_a_slice_that_failed(
    manage: Manage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that clipping had noted a change of, too, and in a sum with those of a backward after the step."""

    def gradients_of(training: Training) -> list[torch.Tensor]:
        return [one.grad.clone() for one in training.model.parameters() if one.grad is not None]

    def run(inside: Any, *, fails: bool) -> list[torch.Tensor]:
        training = begin(ADAMW)
        model: Any = training.model
        with inside(training.optimizer):
            one_step(training)
            evaluate(training)
            training.loss().backward()
            torch.nn.utils.clip_grad_norm_(training.model.parameters(), 0.01)
            late = model.head.bias.sum()
            training.optimizer.step()
            late.backward()
            if not fails:
                return gradients_of(training)

            def failing(sliced: SlicedStep, part: Slice) -> None:
                raise ArithmeticError("no")

            with monkeypatch.context() as patched:
                patched.setattr(SlicedStep, "step", failing)
                with pytest.raises(VdnnError, match="stopped after 0 of 10 parameters"):
                    training.loss()
            return gradients_of(training)

    plain = run(lambda _: contextlib.nullcontext(), fails=False)
    for gradients in (False, True):
        options = {"optimizer_step": "deferred", "gradients": gradients}
        assert same(plain, run(lambda optimizer, given=options: manage(optimizer, **given), fails=True))


def test_a_slice_without_room_waits_on(manage: Manage, monkeypatch: pytest.MonkeyPatch) -> None:
    training = begin(ADAMW)
    fetch = StateCopies.fetch

    def without_room(copies: StateCopies, hosts: list[HostTensor]) -> Moving:
        raise torch.OutOfMemoryError("no room")

    with manage(training.optimizer, optimizer_step="deferred"):
        one_step(training)
        evaluate(training)
        one_step(training)
        monkeypatch.setattr(StateCopies, "fetch", without_room)
        with pytest.raises(torch.OutOfMemoryError):
            training.model(torch.ones(2, 8))
        assert waiting(training) == 10
        monkeypatch.setattr(StateCopies, "fetch", fetch)
        evaluate(training)
        assert same(outcome(training), evaluated(2))


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, also in a process that was started to ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_in_a_slice_waits_for_its_end_and_the_rest_waits_on(
    manage: Manage, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = begin(ADAMW)
    own_step = SlicedStep.step
    armed = [True]

    def interrupted(sliced: SlicedStep, part: Slice) -> None:
        if armed:
            armed.clear()
            signal.raise_signal(signal.SIGINT)
        own_step(sliced, part)

    with manage(training.optimizer, optimizer_step="deferred"):
        one_step(training)
        one_step(training)
        monkeypatch.setattr(SlicedStep, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            training.model(torch.ones(2, 8))
        assert 0 < waiting(training) < 10
        assert same(outcome(training), expected(2))
        one_step(training)
    assert same(outcome(training), expected(3))


def test_an_exit_by_an_exception_finishes_the_step(manage: Manage) -> None:
    training = begin(ADAMW)
    with contextlib.suppress(ArithmeticError), manage(training.optimizer, optimizer_step="deferred"):
        one_step(training)
        one_step(training)
        assert waiting(training) == 10
        raise ArithmeticError("the program's own")
    assert waiting(training) == 0
    assert same(outcome(training), expected(2))


def test_wrong_arguments_are_refused() -> None:
    optimizer = begin(ADAMW).optimizer
    cases: list[tuple[dict[str, Any], str]] = [
        ({"optimizer_step": "later"}, "optimizer_step: expected 'immediate' or 'deferred', got 'later'"),
        ({"optimizer_step": "deferred", "optimizer": None}, "optimizer_step: whose steps are deferred"),
        ({"optimizer_step": "deferred", "optimizer_on": "cpu"}, "and optimizer_on='cpu' takes them to the host"),
    ]
    for options, said in cases:
        with pytest.raises(ValueError, match=said):
            vdnn.offload(**{"device": "sim", "optimizer": optimizer, **options})


def test_several_ranks_are_refused_before_anything_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    training = begin(ADAMW)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    session = vdnn.offload("vdnn-all", device="sim", optimizer=training.optimizer, optimizer_step="deferred")
    with pytest.raises(VdnnError, match="DDP and FSDP read parameters where no hook can step them first"):
        session.__enter__()
    assert "state" not in vars(torch.optim.Optimizer)
    one_step(training)
    assert waiting(training) == 0


def test_nothing_waits_once_something_was_compiled(manage: Manage, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._dynamo.utils

    monkeypatch.setitem(torch._dynamo.utils.counters["frames"], "total", 1)
    training = begin(ADAMW)
    with manage(training.optimizer, optimizer_step="deferred") as session:
        one_step(training)
        assert waiting(training) == 0
        assert "10 parameters were stepped at once in the last step: torch.compile" in session.report()
