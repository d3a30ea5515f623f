"""Faults in every way that a training's state leaves the device: the training goes on with the bits of plain PyTorch,
or an error says what to load, and what could not leave is still on the device.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.conftest import open_fake_device
from tests.drawn import quick_and_full
from tests.fake_driver.control import FakeDriver
from tests.runtime.training_state.conftest import Manage, on_host, open_session, reach_fault
from tests.runtime.training_state.loops import OPTIMIZERS, Training, begin, same
from tests.runtime.training_state.parameters.test_all_lives import are_on_host
from tests.runtime.training_state.test_lives import one_step, outcome, state_bytes
from tests.runtime.training_state.ways import SOME_STAY, options_for, ways_of_bits
from vdnn.errors import VdnnError
from vdnn.runtime.torch_internals.parameter_guard import GuardedParameter
from vdnn.runtime.training_state.sliced_step import SlicedStep
from vdnn.runtime.training_state.slices import Slice
from vdnn.runtime.training_state.state_copies import StateCopies

pytestmark = pytest.mark.usefixtures("one_form_of_the_step")

ADAMW = OPTIMIZERS["adamw"]
OUT_OF_MEMORY, INVALID_VALUE = 2, 1


def begun(way: str) -> tuple[Training, dict[str, Any]]:
    training = begin(ADAMW)
    return training, options_for(way, training)


def waiting(training: Training) -> int:
    return sum(type(one) is GuardedParameter for one in training.model.parameters())


def evaluate(training: Training) -> None:
    """Steps what waits. No graph, so that no activation leaves."""
    with torch.no_grad():
        training.loss()


def stepped(training: Training) -> None:
    """The step of the optimizer, also of what it defers."""
    training.optimizer.step()
    training.model(torch.ones(2, 8))


def whole_step(training: Training) -> None:
    one_step(training)
    evaluate(training)


def expected(way: str, steps: int, step: Callable[[Training], None] = one_step) -> list[Any]:
    training, _ = begun(way)
    for _ in range(steps):
        step(training)
    return outcome(training)


def steps_inside(way: str) -> int:
    """Two where something stays behind the first one."""
    return 2 if way == SOME_STAY else 1


def life(
    driver: FakeDriver, way: str, fault: int | None = None, calls: list[str] | None = None
) -> tuple[Any, list[str]]:
    """A step in plain PyTorch, one or two in a session, and one behind it. Returns what it comes to, and the driver's
    calls from the entry to the exit."""
    training, options = begun(way)
    whole_step(training)
    with (
        contextlib.closing(open_fake_device(driver)) as device,
        contextlib.closing(open_session(device, training.optimizer, policy="keep", **options)) as session,
    ):
        session._engine.transport_for(torch.device("cpu"))
        before = driver.call_count
        if fault is not None:
            driver.fail_nth(fault, INVALID_VALUE)
        with session:
            for _ in range(steps_inside(way)):
                whole_step(training)
        made = driver.calls()[before:]
        if fault is not None:
            reach_fault(driver, fault, calls or [])
    whole_step(training)
    return outcome(training), made


# Ten parameters with two tensors of state each, which leave at the entry, and come and leave in the step. A gradient
# leaves, comes for the step, and leaves again if the step is not deferred. A frozen parameter leaves, comes for
# forward, backward and evaluation, and is back in the end. A step on the CPU takes gradients and parameters, and
# returns those.
COPIES = {
    "state": 3 * 20,
    "gradients": 3 * 20 + 3 * 10,
    "frozen": 3 * 18 + 5,
    "deferred": 3 * 20,
    "deferred, frozen": 3 * 18 + 5,
    "deferred, gradients": 3 * 20 + 2 * 10,
    "on the cpu": 20 + 3 * 10,
}


def spread(calls: list[str], most: int) -> list[int]:
    """The numbers of `most` calls of each kind, from its first to its last."""
    kinds: dict[str, list[int]] = {}
    for nth, call in enumerate(calls, 1):
        kinds.setdefault(call, []).append(nth)
    chosen = [nths[round(at * (len(nths) - 1) / most)] for nths in kinds.values() for at in range(most + 1)]
    return sorted(set(chosen))


@quick_and_full("most", 2, 60)
@ways_of_bits
def test_each_driver_call_refused_in_turn_changes_no_bit(way: str, most: int, fake_driver: FakeDriver) -> None:
    """Refuses the first, the middle and the last of each kind of call, or more."""
    wanted = expected(way, 2 + steps_inside(way), whole_step)
    found, calls = life(fake_driver, way)
    assert same(wanted, found)
    copies = sum("Memcpy" in call for call in calls)
    assert copies == COPIES.get(way, copies) > 0
    for nth in spread(calls, most):
        # Those enter and leave the context. The core tells of a refused one at its next call, the last one at close().
        if not calls[nth - 1].startswith(("cuCtx", "cuThreadExchange")):
            assert same(wanted, life(fake_driver, way, nth, calls)[0]), (nth, calls[nth - 1])


@quick_and_full("most", 4, 100)
@ways_of_bits
def test_each_host_allocation_refused_in_turn_leaves_its_bytes_on_the_device(
    way: str, most: int, fake_driver: FakeDriver
) -> None:
    wanted, refused = expected(way, 2), 0
    for nth in range(1, most + 1):
        training, options = begun(way)
        with (
            contextlib.closing(open_fake_device(fake_driver)) as device,
            contextlib.closing(open_session(device, training.optimizer, **options)) as session,
        ):
            fake_driver.fail_call("cuMemHostRegister", nth, OUT_OF_MEMORY)
            with session:
                for _ in range(2):
                    one_step(training)
                pending = fake_driver.faults_pending
                assert same(outcome(training), wanted), nth
                assert on_host(training.optimizer) <= state_bytes(training)
                assert session.report()
        fake_driver.reset()
        refused += not pending
        if pending:
            break
    assert refused


@ways_of_bits
def test_copies_that_are_refused_now_and_then_leave_the_bits(
    way: str, manage: Manage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused on its way to the host, the copy on the device is the tensor from then on."""
    wanted, leave, refused = expected(way, 6), StateCopies.leave, 0
    for every in (2, 3, 5):
        calls = 0

        def refusing(self: StateCopies, tensors: Any, hosts: Any, every: int = every) -> bool:
            nonlocal calls, refused
            calls += 1
            refused += calls % every == 0
            return calls % every != 0 and leave(self, tensors, hosts)

        monkeypatch.setattr(StateCopies, "leave", refusing)
        training, options = begun(way)
        with manage(training.optimizer, **options):
            for _ in range(6):
                one_step(training)
        assert same(outcome(training), wanted), every
    assert refused or "cpu" in way


# Exceptions of the program.


@ways_of_bits
@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_an_exception_in_forward_backward_or_closure_leaves_a_training_that_goes_on(
    error: type[BaseException], way: str, manage: Manage
) -> None:
    def failing(*_: object) -> Any:
        raise error

    def run(inside: Any) -> list[Any]:
        training, options = begun(way)
        last = training.model.get_submodule("last")
        with inside(training.optimizer, **options):
            one_step(training)
            for register in (last.register_forward_pre_hook, last.register_full_backward_hook):
                for _ in range(2):
                    one_step(training)
                with contextlib.closing(Registered(register(failing))), pytest.raises(error):
                    training.loss().backward()
                training.found.append([one.grad for one in training.model.parameters()])
                training.optimizer.zero_grad()
            training.loss().backward()
            with pytest.raises(error):
                training.optimizer.step(failing)
            one_step(training)
            return outcome(training)

    assert same(run(plain), run(manage))
    assert torch.overrides._get_current_function_mode() is None


class Registered:
    def __init__(self, handle: Any) -> None:
        self.close = handle.remove


def plain(optimizer: Any, **options: Any) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


@ways_of_bits
def test_an_exit_by_an_exception_leaves_the_training_of_plain_pytorch(way: str, manage: Manage) -> None:
    training, options = begun(way)
    with contextlib.suppress(ZeroDivisionError), manage(training.optimizer, **options):
        for _ in range(2):
            one_step(training)
        raise ZeroDivisionError
    assert {type(one) for one in training.model.parameters()} == {torch.nn.Parameter}
    assert torch.overrides._get_current_function_mode() is None
    one_step(training)
    assert same(outcome(training), expected(way, 3))


# A step that fails in the middle.


@ways_of_bits
def test_a_slice_that_fails_names_what_to_load(way: str, manage: Manage, monkeypatch: pytest.MonkeyPatch) -> None:
    training, options = begun(way)
    model, step = training.model, SlicedStep.step

    def failing(sliced: SlicedStep, part: Slice) -> None:
        if any(one is model.last.weight for one in part.all_parameters()):
            raise ArithmeticError("no")
        step(sliced, part)

    with manage(training.optimizer, **options):
        one_step(training)
        evaluate(training)
        groups = [len(group["params"]) for group in training.optimizer.param_groups]
        training.loss().backward()
        monkeypatch.setattr(SlicedStep, "step", failing)
        said = r"the step of AdamW stopped after \d of 10 parameters: no. Model and optimizer are between two steps"
        with pytest.raises(VdnnError, match=said) as raised:
            stepped(training)
        assert isinstance(raised.value.__cause__, ArithmeticError)
        assert waiting(training) == 0
        assert all(are_on_host(training)) or not way.startswith("all")
        assert groups == [len(group["params"]) for group in training.optimizer.param_groups]
        monkeypatch.setattr(SlicedStep, "step", step)
        one_step(training)  # it goes on, as after a step that failed in plain PyTorch
        assert all(one.isfinite().all() for one in model.parameters())
        assert on_host(training.optimizer) in (0, state_bytes(training))
        load(training, begin(ADAMW))
        one_step(training)
    loaded, _ = begun(way)
    one_step(loaded)
    assert same(list(loaded.model.parameters()), list(model.parameters()))


def load(training: Training, good: Training) -> None:
    """A checkpoint of before the first step."""
    training.model.load_state_dict(good.model.state_dict())
    training.optimizer.load_state_dict(good.optimizer.state_dict())
    training.batches = good.batches


@pytest.mark.usefixtures("interruptible")
@ways_of_bits
def test_ctrl_c_in_the_middle_of_a_step_waits_for_the_end_of_what_runs(
    way: str, manage: Manage, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, options = begun(way)
    step, handler, armed = SlicedStep.step, signal.getsignal(signal.SIGINT), [True]

    def interrupted(sliced: SlicedStep, part: Slice) -> None:
        if armed:
            armed.clear()
            signal.raise_signal(signal.SIGINT)
        step(sliced, part)

    with manage(training.optimizer, **options):
        one_step(training)
        evaluate(training)
        training.loss().backward()
        monkeypatch.setattr(SlicedStep, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            stepped(training)
        assert 0 < waiting(training) < 10 or "deferred" not in way
        training.optimizer.zero_grad()
        assert signal.getsignal(signal.SIGINT) is handler
        evaluate(training)
        whole_step(training)
    assert same(outcome(training), expected(way, 3, whole_step))
