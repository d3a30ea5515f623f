"""vdnn.save_on_cpu in place of torch.autograd.graph.save_on_cpu: the same calls and the same gradients, on
one device.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import vdnn
import vdnn.runtime.session.save_on_cpu as room
from tests.patience import PATIENCE_S
from tests.runtime.conftest import OpenSession
from tests.runtime.rigs.lives import one_backward as train
from tests.runtime.rigs.networks import conv_chain, images, perceptron
from tests.runtime.rigs.side_by_side import alive, assert_nothing_alive, assert_same_as_plain, differences, outcome
from vdnn import _C
from vdnn.runtime.session.engine import Engine
from vdnn.runtime.session.session import Session
from vdnn.runtime.storage.counters import Kept
from vdnn.runtime.storage.transport import Transport, TransportOptions


@pytest.fixture
def place(schedule: _C.Schedule, monkeypatch: pytest.MonkeyPatch) -> Iterator[_C.Device]:
    """A device on which the shared session has windows of two maps of this file. After the test it is checked for
    violations and must be empty."""
    monkeypatch.setattr(room, "_OPTIONS", TransportOptions(offload_window_bytes=16 << 10, reload_window_bytes=16 << 10))
    device = _C.OrderingChecker(_C.SimDevice(schedule=schedule, seed=5))
    yield device
    if not device.closed:
        session = vdnn.save_on_cpu(device=device)
        assert_nothing_alive(session)
        session.close()
        device.close()
    assert device.take_violations() == []


def wide(depth: int = 4) -> tuple[nn.Sequential, torch.Tensor]:
    """A chain with maps of 8 KiB, all of which are offloaded: Linear saves its input, tanh its result."""
    return perceptron(64, depth), torch.randn(32, 64)


def transport_of(session: Session) -> Transport:
    (transport,) = (one for one in session._engine.transports.values() if one is not None)
    return transport


def test_the_signature_begins_as_torchs() -> None:
    ours = list(inspect.signature(vdnn.save_on_cpu).parameters.values())
    torchs = list(inspect.signature(torch.autograd.graph.save_on_cpu).parameters.values())
    assert [one.name for one in torchs] == ["pin_memory", "device_type"]
    assert [one.name for one in ours[:2]] == ["pin_memory", "device_type"]
    assert [one.kind for one in ours[:2]] == [one.kind for one in torchs]
    assert ours[1].default == torchs[1].default == "cuda"
    assert all(one.kind is inspect.Parameter.KEYWORD_ONLY for one in ours[2:])


def test_gradients_are_those_of_torchs_bit_for_bit(place: _C.Device) -> None:
    model, x = conv_chain(8), images(8, 8)

    def under(hooks: object) -> list[tuple[str, torch.Tensor | None]]:
        def step() -> torch.Tensor:
            with hooks:  # type: ignore[attr-defined]
                loss = model(x).square().sum()
            loss.backward()
            return loss  # type: ignore[no-any-return]

        return outcome(step, [model])

    session = vdnn.save_on_cpu(device=place)
    expected = under(torch.autograd.graph.save_on_cpu(pin_memory=False))
    assert differences(expected, under(session)) == []
    assert session.counters.reloads > 0, session.report()


def test_backward_runs_inside_and_outside(place: _C.Device) -> None:
    model, x = wide()
    plain = outcome(lambda: train(model, x), [model])

    def outside() -> torch.Tensor:
        with vdnn.save_on_cpu(device=place):
            loss = model(x).square().sum()
        loss.backward()
        return loss  # type: ignore[no-any-return]

    assert differences(plain, outcome(outside, [model])) == []
    with vdnn.save_on_cpu(device=place) as session:
        assert differences(plain, outcome(lambda: train(model, x), [model])) == []
    assert session.counters.reloads > 0, session.report()


def test_a_retained_graph_goes_backward_again_after_it_was_left(place: _C.Device) -> None:
    model, x = wide()

    def twice() -> torch.Tensor:
        loss = model(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        return loss  # type: ignore[no-any-return]

    assert_same_as_plain(vdnn.save_on_cpu(device=place), twice, model)


def test_many_entries_open_one_device_and_pin_once(place: _C.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[torch.device] = []
    native_device = Engine._native_device

    def counted(self: Engine, device: torch.device) -> tuple[_C.Device | None, bool]:
        opened.append(device)
        return native_device(self, device)

    monkeypatch.setattr(Engine, "_native_device", counted)
    model, x = wide()
    pinned = 0
    for step in range(20):
        with vdnn.save_on_cpu(True, device=place) as session:
            hidden = model[:4](x)
        with vdnn.save_on_cpu(pin_memory=False, device_type="cuda", device=place) as other:
            loss = model[4:](hidden).sum()
        assert session is other
        loss.backward()
        del hidden, loss
        if step == 2:
            pinned = transport_of(session).pool.stats.pinned_bytes
    assert opened == [x.device]
    assert transport_of(session).pool.stats.pinned_bytes == pinned > 0
    assert vdnn.save_on_cpu() is vdnn.save_on_cpu(device="cuda") is not session


def test_threads_share_one_session_each_with_its_own_hooks(place: _C.Device) -> None:
    models = [wide() for _ in range(3)]
    plain = [outcome(lambda m=model, x=x: train(m, x), [model]) for model, x in models]  # type: ignore[misc]
    problems: list[str] = []
    start = threading.Barrier(3, timeout=PATIENCE_S)

    def run(index: int) -> None:
        model, x = models[index]
        for _ in range(5):
            start.wait()
            with vdnn.save_on_cpu(device=place):
                loss = model(x).square().sum()
            model.zero_grad(set_to_none=True)
            loss.backward()
            grads = dict(plain[index])
            problems.extend(
                f"{index}.{name}"
                for name, weight in model.named_parameters()
                if weight.grad is None or not torch.equal(weight.grad, grads[f"grad of 0.{name}"])  # type: ignore[arg-type]
            )

    threads = [threading.Thread(target=run, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    assert vdnn.save_on_cpu(device=place).counters.storages >= 3 * 5 * 4


def test_inside_a_session_it_wins(place: _C.Device, open_session: OpenSession) -> None:
    session, model, x = open_session(), *wide()

    def step() -> torch.Tensor:
        hidden = model[:4](x)
        outside.append(session.counters.saves)
        with vdnn.save_on_cpu(device=place):
            hidden = model[4:6](hidden)
        outside.append(session.counters.saves)
        loss = model[6:](hidden).square().sum()
        loss.backward()
        return loss  # type: ignore[no-any-return]

    outside: list[int] = []
    assert_same_as_plain(session, step, model)
    before, after = outside[-2:]
    assert before == after > 0, "the session saw nothing of what was saved inside"
    assert vdnn.save_on_cpu(device=place).counters.storages == 2 * 2, "in the plain run and in that under the session"


def test_a_session_inside_it_wins_and_so_do_hooks_of_the_user(place: _C.Device, open_session: OpenSession) -> None:
    session, model, x = open_session(), *wide()
    with vdnn.save_on_cpu(device=place) as outer:
        assert_same_as_plain(session, lambda: train(model, x), model)
        assert_same_as_plain(session, lambda: train(model, x), model)
        seen = outer.counters.saves
        with session:
            train(model, x)
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.detach(), lambda kept: kept):
            train(model, x)
        assert outer.counters.saves == seen
        train(model, x)
        assert outer.counters.saves > seen


def test_paused_and_keep_hold_inside_it(place: _C.Device) -> None:
    model, x = wide()
    part = vdnn.keep(model[2:4])
    kept = vdnn.keep(torch.randn(32, 64))
    with vdnn.save_on_cpu(device=place) as session:
        with vdnn.paused():
            first = model[:2](x)
        (part(first).sum() + (kept * first).sum() + first.square().sum()).backward()
    assert session.counters.storages == 1  # `first`, saved by the square
    assert session.counters.kept[Kept.PAUSED] == 2  # x and tanh's result
    assert session.counters.kept[Kept.MARKED] == 3  # the second Linear's input, its tanh's result, and `kept`


def test_parameters_and_small_tensors_stay(place: _C.Device) -> None:
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.BatchNorm1d(64)), torch.randn(32, 64)
    with vdnn.save_on_cpu(device=place) as session:
        train(model, x)
    assert session.counters.storages == 4  # three inputs, and the input of the square
    assert session.counters.kept[Kept.PARAMETER] == 1  # 16 KiB; the first Linear saves no weight, x needs no gradient
    assert session.counters.kept[Kept.SMALL] == 5  # weight, running mean and variance, the batch's mean and deviation


def test_checkpointed_blocks_keep_their_inputs_on_the_host(place: _C.Device) -> None:
    blocks, x = nn.ModuleList(wide(2)[0] for _ in range(3)), torch.randn(32, 64, requires_grad=True)

    def step() -> torch.Tensor:
        hidden = x * 1.5
        for block in blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False)
        loss = hidden.square().sum()
        loss.backward()
        return loss

    assert_same_as_plain(vdnn.save_on_cpu(device=place), step, blocks, x)


def test_tensors_on_the_cpu_pass_through() -> None:
    model, x = wide()
    plain = outcome(lambda: train(model, x), [model])
    session = vdnn.save_on_cpu()
    before = session.counters.kept[Kept.OTHER_DEVICE]
    with session:
        assert differences(plain, outcome(lambda: train(model, x), [model])) == []
    assert session.counters.kept[Kept.OTHER_DEVICE] > before
    assert session.counters.storages == 0


def test_on_the_simulated_device_it_needs_no_handle(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = wide()
    session = vdnn.save_on_cpu(device="sim")
    assert_same_as_plain(session, lambda: train(model, x), model)
    session.close()
    assert_same_as_plain(session, lambda: train(model, x), model)  # a closed session opens again
    session.close()
    assert alive(session) == {}


def test_a_device_that_was_closed_is_forgotten() -> None:
    device = _C.SimDevice()
    session = vdnn.save_on_cpu(device=device)
    assert device in room._sessions
    session.close()
    device.close()
    vdnn.save_on_cpu(device="sim")
    assert device not in room._sessions


def test_another_device_type_is_refused() -> None:
    with pytest.raises(ValueError, match="device_type: expected 'cuda', got 'xpu'. Use torch.autograd.graph.save_on"):
        vdnn.save_on_cpu(device_type="xpu")
    with pytest.raises(ValueError, match="device: expected 'cuda', 'sim', a VirtualMachine or a device .*, got 'tpu'"):
        vdnn.save_on_cpu(device="tpu")
