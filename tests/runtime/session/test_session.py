"""Entering, leaving, pausing and marking: the promises of the context manager beyond the bytes that it moves."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from tests.runtime.conftest import OpenSession
from tests.runtime.rigs.lives import one_backward as train
from tests.runtime.rigs.networks import conv_chain, images, perceptron
from tests.runtime.rigs.side_by_side import assert_nothing_alive, assert_same_as_plain
from vdnn import _C
from vdnn.errors import ClosedError
from vdnn.runtime.session.limits import Limits
from vdnn.runtime.session.offload import keep, offload, paused
from vdnn.runtime.session.session import Session
from vdnn.runtime.storage.counters import Kept


def test_a_session_is_entered_again_and_again(session: Session) -> None:
    model, x = conv_chain(), images()
    for _ in range(3):
        assert_same_as_plain(session, lambda: train(model, x), model)


def test_a_session_is_entered_within_itself(session: Session) -> None:
    model, x = conv_chain(), images()

    def step() -> torch.Tensor:
        hidden = model[:4](x)
        with session:
            hidden = model[4:6](hidden)
        loss = model[6:](hidden).square().sum()
        loss.backward()
        return loss  # type: ignore[no-any-return]

    assert_same_as_plain(session, step, model)


def test_a_session_says_what_it_pinned_at_most(open_session: OpenSession) -> None:
    session = open_session()
    assert session.host_bytes == 0
    with session:
        train(conv_chain(), images())
    pinned = session.host_bytes
    assert pinned >= session.counters.storage_bytes > 0, "all of it is on the host when backward begins"
    with session:
        train(conv_chain(), images())
    assert session.host_bytes == pinned, "the same step again takes the same blocks"


def test_the_innermost_of_nested_sessions_handles_the_saves(open_session: OpenSession) -> None:
    first, second = open_session(), open_session()
    model, x = conv_chain(), images()
    with first:
        train(model, x)
        seen = first.counters.saves
        with second:
            train(model, x)
            with first:
                train(model, x)
        assert second.counters.saves == seen
        assert first.counters.saves == 2 * seen
        train(model, x)
    assert first.counters.saves == 3 * seen
    assert first.counters.storages
    assert second.counters.storages


def test_a_session_decorates_a_function(session: Session) -> None:
    model, x = conv_chain(), images()
    decorated = session(train)
    decorated(model, x)
    moved = session.counters.storages
    assert moved
    decorated(model, x)
    assert session.counters.storages == 2 * moved
    train(model, x)
    assert session.counters.storages == 2 * moved


@pytest.mark.parametrize("leaves_by_error", [False, True])
def test_leaving_restores_every_hook(session: Session, leaves_by_error: bool) -> None:
    hooks = torch.nn.modules.module
    before = (len(hooks._global_forward_hooks), len(hooks._global_forward_pre_hooks))
    model, x = conv_chain(), images()
    if leaves_by_error:
        with pytest.raises(RuntimeError, match="mat1 and mat2"), session:
            model(images(size=16))
    else:
        with session:
            model(x)
    assert (len(hooks._global_forward_hooks), len(hooks._global_forward_pre_hooks)) == before
    saves = session.counters.saves
    train(model, x)
    assert session.counters.saves == saves


def test_entering_where_hooks_are_disabled_leaves_nothing_behind(session: Session) -> None:
    hooks = torch.nn.modules.module
    before = (len(hooks._global_forward_hooks), len(hooks._global_forward_pre_hooks))
    with (
        torch.autograd.graph.disable_saved_tensors_hooks("no hooks in here"),
        pytest.raises(RuntimeError, match="no hooks in here"),
        session,
    ):
        pass
    assert (len(hooks._global_forward_hooks), len(hooks._global_forward_pre_hooks)) == before
    model, x = conv_chain(), images()
    assert_same_as_plain(session, lambda: train(model, x), model)


def test_hooks_that_the_user_sets_inside_win(session: Session) -> None:
    model, x = perceptron(), torch.randn(2, 16)
    packed = []
    with session, torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(1) or t, lambda t: t):
        train(model, x)
    assert packed
    assert session.counters.saves == 0


def test_a_session_inside_hooks_of_the_user_wins(session: Session) -> None:
    model, x = perceptron(), torch.randn(2, 16)
    packed: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(1) or t, lambda t: t):
        assert_same_as_plain(session, lambda: train(model, x), model)
        outside = len(packed)
        with session:
            train(model, x)
        assert len(packed) == outside


def test_a_forward_without_gradients_is_untouched(session: Session) -> None:
    model, x = conv_chain(), images()
    with session:
        with torch.no_grad():
            model(x)
        with torch.inference_mode():
            model(x)
        model.eval()
        with torch.no_grad():
            model(x)
        assert session.counters.saves == 0
        assert not session._engine.transports, "a device was opened for nothing"
        train(model, x)
    assert session.counters.storages


def test_a_kept_tensor_stays(session: Session) -> None:
    model = perceptron()
    x = keep(torch.randn(2, 16))
    assert_same_as_plain(session, lambda: train(model, x), model)
    assert session.counters.kept[Kept.MARKED] == 1


@pytest.mark.parametrize("when", ["before", "inside"])
def test_a_kept_module_keeps_all_that_is_saved_in_its_forward(session: Session, when: str) -> None:
    model, x = nn.Sequential(perceptron(depth=1), perceptron(depth=2)), torch.randn(2, 16)
    if when == "before":
        keep(model[1])
    with session:
        keep(model[1])
        train(model, x)
    # Linear saves its input and its weight, which is kept as a parameter. Tanh saves its output, which the next Linear
    # saves again. The first part offloads the input and one tanh; the second Linear's save finds its input already
    # kept.
    assert session.counters.kept[Kept.MARKED] == 2 * 2
    assert session.counters.storages == 3  # x, the first tanh, and the output that square() saves


def test_what_is_saved_while_paused_stays(session: Session) -> None:
    model, x = perceptron(), torch.randn(2, 16)
    with paused():
        pass  # does nothing without a session
    with session:
        with paused():
            hidden = model[:2](x)
            with paused():
                hidden = model[2:4](hidden)
            hidden = model[4:](hidden)
        assert session.counters.storages == 0
        assert session.counters.kept[Kept.PAUSED] == session.counters.saves - session.counters.kept[Kept.PARAMETER] > 0
        hidden.sum().backward()
        with pytest.raises(RuntimeError, match="mat1 and mat2"), paused():
            model(images())
        train(model, x)
    assert session.counters.storages


def test_saves_made_while_paused_give_the_same_gradients(session: Session) -> None:
    model, x = conv_chain(), images()

    def step() -> torch.Tensor:
        hidden = model[:2](x)
        with paused():
            hidden = model[2:5](hidden)
        loss = model[5:](hidden).square().sum()
        loss.backward()
        return loss  # type: ignore[no-any-return]

    assert_same_as_plain(session, step, model)


def test_cpu_tensors_without_a_simulated_device_pass_through_and_are_warned_of_once(
    recwarn: pytest.WarningsRecorder,
) -> None:
    session = offload(min_bytes=0)
    model, x = perceptron(), torch.randn(2, 16)
    with session:
        train(model, x)
        train(model, x)
    assert [str(one.message) for one in recwarn if "passed through" in str(one.message)] == [
        "vdnn: tensors on the CPU are passed through. Move the model to a GPU, or use "
        "vdnn.offload(device='sim') to try it on the CPU."
    ]
    assert session.counters.kept[Kept.OTHER_DEVICE]
    assert not session.counters.storages


def test_the_policy_for_convolutions_moves_only_what_they_save(open_session: OpenSession) -> None:
    session = open_session("vdnn-conv")
    model, x = conv_chain(), images()
    assert_same_as_plain(session, lambda: train(model, x), model)
    assert session.counters.storages == 2  # the image and the input of the second convolution
    assert session.counters.kept[Kept.POLICY]


def test_the_keeping_policy_moves_nothing_and_does_not_complain(
    open_session: OpenSession, recwarn: pytest.WarningsRecorder
) -> None:
    session = open_session("keep")
    with session:
        train(conv_chain(), images())
    assert session.counters.storages == 0
    assert not recwarn.list


def test_closing_gives_everything_back(session: Session) -> None:
    model, x = conv_chain(), images()
    with session:
        loss = model(x).square().sum()
    (transport,) = session._engine.transports.values()
    assert transport is not None
    session.close()
    assert transport.pool.stats.pinned_bytes == 0
    with pytest.raises(ClosedError, match="can no longer be used"):
        loss.backward()
    session.close()


def test_a_dropped_session_frees_its_transport(schedule: _C.Schedule) -> None:
    device = _C.SimDevice(schedule=schedule)
    session = offload(device=device, min_bytes=0)
    model, x = conv_chain(), images()
    with session:
        loss = model(x).square().sum()
    (transport,) = session._engine.transports.values()
    gone = weakref.ref(transport)
    del session, transport
    loss.backward()
    del loss
    gc.collect()
    assert gone() is None
    device.close()


def test_a_graph_outlives_the_dropped_session(schedule: _C.Schedule) -> None:
    model, x = conv_chain(), images()
    train(model, x)
    plain = [weight.grad for weight in model.parameters()]
    model.zero_grad(set_to_none=True)
    session = offload(device=_C.SimDevice(schedule=schedule), min_bytes=0, limits=Limits(offload_window="1KiB"))
    with session:
        loss = model(x).square().sum()
    del session
    gc.collect()
    loss.backward()
    assert all(torch.equal(weight.grad, expected) for weight, expected in zip(model.parameters(), plain, strict=True))


def test_the_report_says_what_was_moved_and_what_stayed(session: Session) -> None:
    with session:
        train(conv_chain(), images())
    text = session.report()
    assert f"offloaded {session.counters.storages} storages" in text
    assert "a parameter or buffer, or a view of one" in text
    assert_nothing_alive(session)
