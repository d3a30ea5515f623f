"""The life of a managed optimizer: sessions that come and go, saved and loaded states, hooks, copies, 1,000 steps."""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref
from typing import Any

import pytest
import torch

from tests.runtime.training_state.conftest import Manage, on_host, open_session
from tests.runtime.training_state.loops import OPTIMIZERS, SignOfMomentum, Training, begin, same
from vdnn import _C
from vdnn.runtime.torch_internals.gradient_reads import native_gradient
from vdnn.runtime.training_state.optimizer_state import _parts_of, state_of

ADAMW = OPTIMIZERS["adamw"]


def one_step(training: Training) -> None:
    training.loss().backward()
    training.optimizer.step()
    training.optimizer.zero_grad()


def outcome(training: Training) -> list[Any]:
    saved = copy.deepcopy(training.optimizer.state_dict())
    return [*training.found, *(one.detach().clone() for one in training.model.parameters()), saved]


def expected(steps: int) -> list[Any]:
    training = begin(ADAMW)
    for _ in range(steps):
        one_step(training)
    return outcome(training)


def state_bytes(training: Training) -> int:
    tensors = [one for state in training.optimizer.state.values() for one in state.values() if one.dim()]
    return sum(one.nbytes for one in tensors)


def test_between_steps_all_state_but_scalars_is_in_pinned_memory_once(manage: Manage) -> None:
    training = begin(ADAMW)
    with manage(training.optimizer) as session:
        one_step(training)
        needed = state_bytes(training)
        assert on_host(training.optimizer) == needed
        transport = session._engine.transports.opened()[0]
        for _ in range(2):
            transport.queue.collect()  # the copies of activations that are gone
            assert transport.state_bytes == transport.pool.stats.live_bytes == needed
            one_step(training)


def test_a_tensor_of_the_state_is_the_same_object_after_each_step(manage: Manage) -> None:
    training = begin(ADAMW)
    with manage(training.optimizer):
        one_step(training)
        state = training.optimizer.state[training.model.head.weight]  # type: ignore[index]
        held = state["exp_avg"]
        before = held.clone()
        one_step(training)
        assert state["exp_avg"] is held
        assert not torch.equal(held, before)


def test_a_step_between_two_sessions_brings_the_state_back(device: _C.Device) -> None:
    training = begin(ADAMW)
    with contextlib.closing(open_session(device, training.optimizer)) as session:
        for _ in range(2):
            with session:
                one_step(training)
            assert on_host(training.optimizer) == state_bytes(training)
        one_step(training)
        assert on_host(training.optimizer) == 0
        with session:
            one_step(training)
            assert on_host(training.optimizer) == state_bytes(training)
    assert same(outcome(training), expected(4))


def test_a_session_for_each_step_leaves_the_state_where_it_is(device: _C.Device) -> None:
    training = begin(ADAMW)
    sessions = []
    for _ in range(4):
        sessions.append(open_session(device, training.optimizer))
        with sessions[-1]:
            one_step(training)
    moved = state_of(training.optimizer).moved
    assert moved.to_device_bytes == 3 * state_bytes(training)
    assert moved.to_host_bytes == 4 * state_bytes(training)
    assert same(outcome(training), expected(4))
    for session in sessions:
        session.close()


def test_state_that_was_there_before_leaves_at_the_entry(manage: Manage) -> None:
    training = begin(ADAMW)
    one_step(training)
    with manage(training.optimizer):
        assert on_host(training.optimizer) == state_bytes(training)
        one_step(training)
    assert same(outcome(training), expected(2))


def test_loading_brings_one_slice_at_a_time_to_the_device_and_calls_hooks_once(
    manage: Manage, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = begin(ADAMW)
    calls: list[str] = []
    training.optimizer.register_load_state_dict_pre_hook(lambda *_: calls.append("before"))
    training.optimizer.register_load_state_dict_post_hook(lambda *_: calls.append("after"))
    with manage(training.optimizer) as session:
        one_step(training)
        pool = session._engine.transports.opened()[0].pool
        saved = copy.deepcopy(training.optimizer.state_dict())
        for state in saved["state"].values():  # no tensors that torch would take for the optimizer's own
            state.update({name: value.double() for name, value in state.items() if name != "step"})
        made: list[int] = []
        process = torch.optim.Optimizer._process_value_according_to_param_policy

        def counted(parameter: torch.Tensor, value: torch.Tensor, *rest: Any) -> torch.Tensor:
            made.append(pool.stats.live_bytes)
            return process(parameter, value, *rest)

        monkeypatch.setattr(torch.optim.Optimizer, "_process_value_according_to_param_policy", staticmethod(counted))
        training.optimizer.load_state_dict(saved)
        assert len(set(made)) > 2, "nothing left between two tensors that were loaded"
        assert on_host(training.optimizer) == state_bytes(training)
        loaded = training.optimizer.state_dict()["state"]
        assert all(same(one["exp_avg"], loaded[index]["exp_avg"].double()) for index, one in saved["state"].items())
    assert calls == ["before", "after"]


def test_no_part_of_a_loaded_state_is_larger_than_its_room_unless_it_is_of_one_parameter() -> None:
    saved: dict[Any, Any] = {
        name: {"sum": torch.zeros(size), "step": 1} for name, size in enumerate([25, 25, 25, 90, 5])
    }
    parts = list(_parts_of(saved, 4 * 60))
    assert [list(part) for part in parts] == [[0, 1], [2], [3], [4]]
    assert [list(part) for part in _parts_of(saved, 4 * 170)] == [[0, 1, 2, 3, 4]]


@pytest.mark.parametrize("where", ["device", "cpu"])
def test_state_below_the_least_size_stays_on_the_device(where: str, manage: Manage) -> None:
    at_least, below = torch.nn.Parameter(torch.ones(256)), torch.nn.Parameter(torch.ones(255))
    optimizer = torch.optim.AdamW([at_least, below])
    with manage(optimizer, optimizer_on=where, min_bytes=1024):
        for _ in range(2):
            (at_least.sum() + below.sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
            assert on_host(optimizer) == 2 * 1024


def test_gradients_below_the_least_size_stay_on_the_device(manage: Manage) -> None:
    at_least, below = torch.nn.Parameter(torch.ones(256)), torch.nn.Parameter(torch.ones(255))
    optimizer = torch.optim.AdamW([at_least, below])
    with manage(optimizer, gradients=True, min_bytes=1024):
        (at_least.sum() + below.sum()).backward()
        assert [native_gradient(one) is None for one in (at_least, below)] == [True, False]


def test_a_state_that_does_not_fit_is_refused_as_in_plain_pytorch_and_changes_nothing(manage: Manage) -> None:
    training = begin(ADAMW)
    with manage(training.optimizer):
        one_step(training)
        saved = copy.deepcopy(training.optimizer.state_dict())
        wrong = copy.deepcopy(saved)
        wrong["param_groups"][0]["params"].pop()
        with pytest.raises(ValueError, match="doesn't match the size"):
            training.optimizer.load_state_dict(wrong)
        assert same(saved, training.optimizer.state_dict())
        one_step(training)
        assert same(outcome(training), expected(2))


def test_hooks_of_steps_run_once_and_see_all_parameters(manage: Manage) -> None:
    training = begin(ADAMW)
    seen: list[tuple[str, int]] = []

    def note(name: str) -> Any:
        return lambda optimizer, *_: seen.append((name, len(optimizer.param_groups[0]["params"])))

    training.optimizer.register_step_pre_hook(note("before"))
    with manage(training.optimizer):
        training.optimizer.register_step_post_hook(note("after"))
        one_step(training)
    number = len(list(training.model.parameters()))
    assert seen == [("before", number), ("after", number)]


@pytest.mark.parametrize("is_made_inside", [False, True])
def test_a_scheduler_made_before_or_inside_sees_the_steps(is_made_inside: bool, manage: Manage) -> None:
    training = begin(ADAMW)
    make = torch.optim.lr_scheduler.StepLR
    scheduler = None if is_made_inside else make(training.optimizer, 1)
    with manage(training.optimizer):
        scheduler = scheduler or make(training.optimizer, 1)
        one_step(training)
        scheduler.step()  # warns, which is an error here, unless the optimizer has stepped
        assert on_host(training.optimizer) == state_bytes(training)
    assert training.optimizer.param_groups[0]["lr"] == pytest.approx(1e-3)


def test_other_optimizers_of_the_class_step_by_themselves(manage: Manage) -> None:
    training, other = begin(ADAMW), begin(ADAMW)
    with manage(training.optimizer):
        one_step(training)
        one_step(other)
        assert same(outcome(training), outcome(other))
        assert other.optimizer not in vars(state_of(training.optimizer)).values()
    step = type(training.optimizer).step
    assert step.__wrapped__ is step.__closure__[step.__code__.co_freevars.index("func")].cell_contents  # type: ignore[attr-defined]


def test_two_optimizers_of_one_session(manage: Manage) -> None:
    def trained(inside: Any) -> list[Any]:
        one, two = begin(ADAMW), begin(SignOfMomentum)
        with inside([one.optimizer, two.optimizer]):
            for _ in range(4):
                one_step(one)
                one_step(two)
            return [*outcome(one), *outcome(two)]

    assert same(trained(lambda _: contextlib.nullcontext()), trained(manage))


def test_a_closed_session_inside_of_it_leaves_readable_state(device: _C.Device) -> None:
    training = begin(ADAMW)
    with open_session(device, training.optimizer) as session:
        one_step(training)
        session.close()
        assert same(outcome(training), expected(1))
        one_step(training)
        assert same(outcome(training), expected(2))
    session.close()
    assert same(outcome(training), expected(2))


def test_a_deep_copy_is_a_plain_optimizer_with_the_same_state(manage: Manage) -> None:
    training = begin(ADAMW)
    with manage(training.optimizer):
        one_step(training)
        model, optimizer = copy.deepcopy((training.model, training.optimizer))
        assert same(optimizer.state_dict(), training.optimizer.state_dict())
        copied = Training(model, optimizer, training.batches, list(training.found))
        one_step(copied)
        assert same(outcome(copied), expected(2))
        assert on_host(training.optimizer) == state_bytes(training)
    assert "__deepcopy__" not in vars(optimizer) | vars(training.optimizer)


def test_what_the_program_holds_of_the_state_can_be_read_after_the_session(device: _C.Device) -> None:
    training = begin(ADAMW)
    with contextlib.closing(open_session(device, training.optimizer)) as session, session:
        for _ in range(2):
            one_step(training)
        held = training.optimizer.state[training.model.head.weight]["exp_avg"]  # type: ignore[index]
        saved = training.optimizer.state_dict()
        copied = copy.deepcopy(saved)
    device.close()
    assert same(saved, copied)
    assert torch.equal(held, training.optimizer.state[training.model.head.weight]["exp_avg"])  # type: ignore[index]


def test_an_optimizer_that_is_gone_leaves_nothing(device: _C.Device) -> None:
    training = begin(ADAMW)
    session = open_session(device, training.optimizer)
    with session:
        one_step(training)
        transport = session._engine.transports.opened()[0]
        gone = weakref.ref(training.optimizer)
        del training
        gc.collect()
        assert gone() is None
        transport.queue.collect()
        assert transport.state_bytes == transport.pool.stats.live_bytes == 0
        assert "0 B on the host" in session.report()
    session.close()


def test_the_report_says_where_the_state_is(manage: Manage) -> None:
    training = begin(ADAMW)
    with manage(training.optimizer) as session:
        for _ in range(2):
            one_step(training)
            # 496 elements, twice, of four bytes; in two steps they leave twice and come once.
        line = next(line for line in session.report().splitlines() if "optimizer state" in line)
    assert line.startswith("  optimizer state of AdamW: 3.88 KiB on the host, 5.81 KiB crossed the link per step, for")
