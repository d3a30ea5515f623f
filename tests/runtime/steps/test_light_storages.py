"""The gate moves by itself what a settled plan offloads; whatever is not as planned falls back to Python."""

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
from tests.runtime.rigs.light_steps import Model, host_bytes, light_lifetimes, light_session, same, transport_of
from tests.runtime.rigs.settled_steps import OFFLOADS_ALL, OFFLOADS_SOME, Network, settled_session, settling_of
from tests.runtime.steps.test_settled_steps import CALLED_BY_THE_GATE, python_calls
from tests.runtime.unusual.test_bookkeeping import Interrupt
from vdnn._C import LightSave
from vdnn.errors import DriverError
from vdnn.runtime.storage.counters import Kept
from vdnn.runtime.storage.kept import unpack_without_hooks
from vdnn.runtime.storage.packed_view import PackedView

pytestmark = pytest.mark.filterwarnings("ignore::vdnn.user_warnings.VdnnWarning")
OUT_OF_MEMORY = 2  # of the driver


@pytest.fixture
def expected() -> list[torch.Tensor]:
    return Model().step()


def saved_by(node: Any) -> list[Any]:
    """What the hooks packed for the nodes of a graph."""
    found, seen, nodes = [], set(), [node]
    while nodes:
        one = nodes.pop()
        if one is None or one in seen:
            continue
        seen.add(one)
        slots = [getattr(one, name) for name in dir(one) if name.startswith("_raw_saved_")]
        found += [slot.data for slot in slots if hasattr(slot, "data")]
        nodes += [parent for parent, _ in one.next_functions]
    return found


def test_a_settled_step_moves_its_storages_without_python(monkeypatch: pytest.MonkeyPatch, expected: Any) -> None:
    with light_session(monkeypatch) as (session, model, handed_over):
        before = session.counters.storages, session.counters.prefetched_reloads
        with python_calls() as called:
            gradients = model.step()
        light = light_lifetimes(session)
        session.step()
        assert settling_of(session).is_expected
        assert same(gradients, expected)
        assert len(light) >= 20
        assert handed_over.lifetimes == []
        assert session.counters.storages - before[0] >= len(light)
        assert session.counters.prefetched_reloads - before[1] >= len(light)
        # The first save of the step, and what lies on the leaf that it saves, is Python's.
        hooks = [name for name in called if name in CALLED_BY_THE_GATE]
        assert len(hooks) <= 12, hooks


def test_views_and_shared_storages_have_one_copy(monkeypatch: pytest.MonkeyPatch, expected: Any) -> None:
    with light_session(monkeypatch) as (session, model, _):
        loss = model.forward()
        packed = [one for one in saved_by(loss.grad_fn) if type(one) is LightSave]
        assert len(packed) > len(light_lifetimes(session)) + 8
        loss.backward()
        assert same(model.gradients(), expected)
        shared, copies = session.counters.shared_saves, session.counters.storages
        session.step()
        assert session.counters.shared_saves - shared > 8
        assert 0 < session.counters.storages - copies <= len(packed) - 8


def test_the_counts_are_those_of_python(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = []
    for is_light in (True, False):
        with light_session(monkeypatch) as (session, model, _):
            if not is_light:
                monkeypatch.setattr("vdnn.runtime.session.light_storages._may_be_light", lambda transport: False)
            first = vars(session.counters).copy()
            for _ in range(3):
                model.step()
                session.step()
            last = vars(session.counters)
            names = [name for name in last if isinstance(last[name], int)]
            counted.append({name: last[name] - first[name] for name in names})
            assert host_bytes(session) == 0
    assert counted[0] == counted[1]


def test_two_backward_passes(monkeypatch: pytest.MonkeyPatch, expected: Any) -> None:
    with light_session(monkeypatch) as (session, model, handed_over):
        loss = model.forward()
        loss.backward(retain_graph=True)
        first = [gradient.clone() for gradient in model.gradients()]
        loss.backward()
        assert same(first, expected)
        assert same(model.gradients(), expected)
        session.step()
        assert handed_over.lifetimes
        assert same(model.step(), expected)


def test_a_gradient_of_a_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    def of(model: Model) -> list[torch.Tensor]:
        (gradient,) = torch.autograd.grad(model.forward(), model.weights[:1], create_graph=True)
        gradient.square().sum().backward()
        return model.gradients()

    expected = of(Model())
    with light_session(monkeypatch) as (session, model, handed_over):
        assert same(of(model), expected)
        session.step()
        assert handed_over.lifetimes


@pytest.mark.parametrize("is_late", [False, True])
def test_a_write_to_what_was_saved_is_refused(monkeypatch: pytest.MonkeyPatch, is_late: bool) -> None:
    held = []
    with light_session(monkeypatch) as (session, model, _):
        loss = model.forward(lambda y: held.append(y) or y)  # type: ignore[func-returns-value]
        if is_late:
            gc.collect()
        with torch.no_grad():
            held.pop().mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        del loss
        model.gradients()
        session.step()
        model.step()
        session.step()
        assert host_bytes(session) == 0


def test_a_storage_that_the_program_holds_is_used_in_place(monkeypatch: pytest.MonkeyPatch, expected: Any) -> None:
    held = []
    with light_session(monkeypatch) as (session, model, handed_over):
        before = session.counters.copied_not_freed_bytes, session.counters.used_in_place
        assert same(model.step(lambda y: held.append(y) or y), expected)  # type: ignore[func-returns-value]
        session.step()
        assert handed_over.lifetimes
        assert session.counters.copied_not_freed_bytes > before[0]
        assert session.counters.used_in_place > before[1]
        assert "saved in no module" in session.report()


def test_a_storage_that_was_held_at_its_release_is_reloaded_later(
    monkeypatch: pytest.MonkeyPatch, expected: Any
) -> None:
    held = []
    with light_session(monkeypatch) as (session, model, handed_over):
        loss = model.forward(lambda y: held.append(y) or y)  # type: ignore[func-returns-value]
        held.clear()
        loss.backward()
        assert same(model.gradients(), expected)
        session.step()
        assert handed_over.lifetimes == []
        assert settling_of(session).is_expected


def test_a_write_through_data_to_a_held_storage_shows_as_in_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def of(model: Model) -> list[torch.Tensor]:
        held: list[torch.Tensor] = []
        loss = model.forward(lambda y: held.append(y) or y)  # type: ignore[func-returns-value]
        held[0].data.mul_(2)
        loss.backward()
        return model.gradients()

    expected = of(Model())
    with light_session(monkeypatch) as (_, model, _):
        assert same(of(model), expected)


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


def test_other_code_unpacks_what_the_gate_moved(monkeypatch: pytest.MonkeyPatch, expected: Any) -> None:
    with light_session(monkeypatch) as (_, model, handed_over):
        loss = model.forward()
        packed = next(one for one in saved_by(loss.grad_fn) if type(one) is LightSave)
        assert handed_over.lifetimes == []
        tensor = unpack_without_hooks(packed)
        assert type(packed.full()) is PackedView
        assert len(handed_over.lifetimes) == 1
        assert torch.isfinite(tensor).all()
        loss.backward()
        assert same(model.gradients(), expected)
        assert len(handed_over.lifetimes) == 1, "the others stay light"


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


@pytest.mark.parametrize("plan", [OFFLOADS_SOME, OFFLOADS_ALL])
def test_the_gate_moves_what_a_plan_of_a_budget_offloads(plan: str) -> None:
    """Such a session times its copies, because it records steps."""
    plain = Network()
    expected = plain.step()
    with settled_session(plan) as (session, network):
        before = session.counters.storages
        with python_calls() as called:
            gradients = network.step()
        session.step()
        assert settling_of(session).is_expected
        assert session.counters.storages - before >= 5
        assert called.count("_save") <= 1
        assert all(
            a is not None and b is not None and torch.equal(a, b) for a, b in zip(gradients, expected, strict=True)
        )
