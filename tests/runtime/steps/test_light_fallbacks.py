"""Settled steps that are disturbed while the gate moves storages: bits, host memory and errors are as without it."""

from __future__ import annotations

import gc
import os
import sys
import threading
from typing import Any

import pytest
import torch

import vdnn
from tests.conftest import open_fake_device
from tests.fake_driver.control import FakeDriver
from tests.runtime.rigs.light_steps import Model, host_bytes, light_session, same, transport_of
from tests.runtime.rigs.settled_steps import settling_of
from tests.runtime.unusual.test_bookkeeping import Interrupt
from vdnn.errors import DriverError
from vdnn.runtime.storage.counters import Kept

pytestmark = pytest.mark.filterwarnings("ignore::vdnn.user_warnings.VdnnWarning")
OUT_OF_MEMORY = 2  # of the driver


@pytest.fixture
def expected() -> list[torch.Tensor]:
    return Model().step()


def test_an_exception_in_the_backward_leaves_nothing(monkeypatch: pytest.MonkeyPatch, expected: Any) -> None:
    class Stop(Exception):
        pass

    def stop(_: torch.Tensor) -> None:
        raise Stop

    def with_hook(y: torch.Tensor) -> torch.Tensor:
        y.register_hook(stop)
        return y

    with light_session(monkeypatch) as (session, model, _):
        with pytest.raises(Stop):
            model.step(with_hook)
        model.gradients()
        gc.collect()
        session.step()
        assert host_bytes(session) == 0
        for _ in range(4):
            assert same(model.step(), expected)
            session.step()
        assert settling_of(session).is_expected


def test_a_graph_that_is_dropped_gives_its_host_memory_back(monkeypatch: pytest.MonkeyPatch, expected: Any) -> None:
    with light_session(monkeypatch) as (session, model, _):
        loss = model.forward()
        assert settling_of(session).gate.living > 0  # type: ignore[union-attr]
        del loss
        assert settling_of(session).gate.living == 0  # type: ignore[union-attr]
        assert host_bytes(session) == 0
        session.step()
        assert same(model.step(), expected)


def test_without_host_memory_a_save_stays_on_the_device(monkeypatch: pytest.MonkeyPatch, expected: Any) -> None:
    with light_session(monkeypatch, limits=vdnn.Limits(host_budget="2MiB")) as (session, model, _):
        pool = transport_of(session).pool
        taken = []
        for nbytes in (1 << 16, 1 << 10, 256):
            try:
                while True:
                    taken.append(pool.allocate(nbytes))
            except MemoryError:
                pass
        assert same(model.step(), expected)
        session.step()
        assert session.counters.kept[Kept.HOST_FULL] > 0
        taken.clear()
        for _ in range(5):
            assert same(model.step(), expected)
            session.step()
        assert settling_of(session).is_expected


@pytest.mark.drawn(of=4)
@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.slow) for first in range(1, 10))])
def test_a_refusal_of_the_driver_at_any_call(
    monkeypatch: pytest.MonkeyPatch, fake_driver: FakeDriver, expected: Any, first: int
) -> None:
    """The save stays on the device, or the step raises the driver's error; the next steps are right."""
    device = open_fake_device(fake_driver)
    with light_session(monkeypatch, device) as (session, model, _):
        before = fake_driver.call_count
        model.step()
        session.step()
        calls = fake_driver.call_count - before
        assert calls > 100
        refused = 0
        for nth in range(1 + first, calls, calls // 3):
            fake_driver.fail_nth(nth, OUT_OF_MEMORY)
            try:
                assert same(model.step(), expected), nth
            except DriverError:
                refused += 1
            gc.collect()
            model.gradients()
            session.step()
            assert fake_driver.faults_pending == 0
            for _ in range(5):
                assert same(model.step(), expected), nth
                session.step()
            assert host_bytes(session) == 0
        assert refused <= 3
    session.close()
    device.close()


def test_a_graph_that_outlives_its_session(monkeypatch: pytest.MonkeyPatch, expected: Any) -> None:
    with light_session(monkeypatch) as (_, model, _):
        loss = model.forward()
    loss.backward()
    assert same(model.gradients(), expected)


def test_a_graph_that_outlives_its_step(monkeypatch: pytest.MonkeyPatch, expected: Any) -> None:
    with light_session(monkeypatch) as (session, model, _):
        first = model.forward()
        session.step()
        assert same(model.step(), expected)
        first.backward()
        assert same(model.gradients(), expected)


def test_a_backward_on_another_thread(monkeypatch: pytest.MonkeyPatch, expected: Any) -> None:
    with light_session(monkeypatch) as (session, model, handed_over):
        loss = model.forward()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        assert same(model.gradients(), expected)
        session.step()
        assert handed_over.lifetimes == []


def test_a_graph_that_another_thread_frees(monkeypatch: pytest.MonkeyPatch, expected: Any) -> None:
    with light_session(monkeypatch) as (session, model, _):
        graphs = [model.forward()]
        thread = threading.Thread(target=graphs.clear)
        thread.start()
        thread.join()
        assert host_bytes(session) == 0
        session.step()
        assert same(model.step(), expected)


@pytest.mark.parametrize("makes_a_graph", [False, True])
def test_a_custom_function_that_overwrites_what_it_unpacks(
    monkeypatch: pytest.MonkeyPatch, makes_a_graph: bool
) -> None:
    class Overwrites(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, y: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(y)
            return y * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            (y,) = ctx.saved_tensors
            y.data.mul_(0.5)
            return gradient * y

    expected = Model().step(Overwrites.apply)
    with light_session(monkeypatch) as (session, model, _):
        for _ in range(6 if makes_a_graph else 1):
            assert same(model.step(Overwrites.apply), expected)
            session.step()


def test_a_tensor_that_is_marked_late_stays(monkeypatch: pytest.MonkeyPatch, expected: Any) -> None:
    def marked(y: torch.Tensor) -> torch.Tensor:
        vdnn.keep(y)
        return y

    with light_session(monkeypatch) as (session, model, _):
        kept = session.counters.kept[Kept.MARKED]
        assert same(model.step(marked), expected)
        session.step()
        assert session.counters.kept[Kept.MARKED] > kept


def test_another_stream_is_left_to_python(monkeypatch: pytest.MonkeyPatch, expected: Any) -> None:
    with light_session(monkeypatch) as (session, model, handed_over):
        transport = transport_of(session)
        own = transport.current_stream()
        streams = iter([own] * 40)
        monkeypatch.setattr(transport, "stream_probe", lambda: (lambda: next(streams, None), own))
        assert same(model.step(), expected)
        session.step()
        assert handed_over.lifetimes


def test_integrity_mode_is_left_to_python(monkeypatch: pytest.MonkeyPatch) -> None:
    with light_session(monkeypatch, integrity=True) as (session, model, _):
        integrity = transport_of(session).integrity
        assert integrity is not None
        before = integrity.compared
        model.step()
        session.step()
        assert integrity.compared - before >= 20


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_drops_and_passes_through(monkeypatch: pytest.MonkeyPatch, expected: Any) -> None:
    with light_session(monkeypatch) as (session, model, _):
        loss = model.forward()
        gc.collect()  # objects of earlier tests are not for the child to collect
        child = os.fork()
        if child == 0:
            status = 1
            try:
                del loss
                gradients = model.step()
                status = 0 if same(gradients, expected) else 2
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        loss.backward()
        assert same(model.gradients(), expected)
        session.step()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_anywhere_leaves_the_next_step_right(monkeypatch: pytest.MonkeyPatch, expected: Any) -> None:
    """The steps that are interrupted hand over: the program holds a value, and goes back twice."""
    fired = 0
    for at in range(1, 4000, 211):
        with light_session(monkeypatch) as (session, model, _):
            held: list[torch.Tensor] = []
            try:
                with Interrupt(at) as interrupt:
                    loss = model.forward(lambda y, held=held: held.append(y) or y)  # type: ignore[misc]
                    loss.backward(retain_graph=True)
                    model.gradients()
                    loss.backward()
            except KeyboardInterrupt:
                pass
            fired += interrupt.has_fired
            assert torch.is_grad_enabled()
            held.clear()
            loss = None
            model.gradients()
            sys.settrace(None)
            session.step()
            for _ in range(2):
                assert same(model.step(), expected), at
                session.step()
            if not interrupt.has_fired:
                break
    assert fired >= 10
