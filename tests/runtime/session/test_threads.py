"""Hooks belong to a thread, and graphs do not: parallel sessions, one session on several threads, graphs that move."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tests.conftest import SCHEDULES
from tests.patience import PATIENCE_S
from tests.runtime.conftest import OpenSession
from tests.runtime.rigs.networks import images, small_resnet
from tests.runtime.rigs.side_by_side import (
    alive,
    assert_nothing_alive,
    assert_same_as_plain,
    differences,
    on_threads,
    outcome,
)
from vdnn import _C
from vdnn.errors import VdnnError
from vdnn.runtime.session import engine as engine_module
from vdnn.runtime.session import session as session_module
from vdnn.runtime.session.engine import Engine, EngineOptions
from vdnn.runtime.session.limits import Limits
from vdnn.runtime.session.offload import offload
from vdnn.runtime.session.session import Session
from vdnn.runtime.storage.managed_storage import ManagedStorage
from vdnn.runtime.storage.table import TableEntry
from vdnn.runtime.storage.transport import Transport


@pytest.fixture
def switching_at_every_chance() -> Iterator[None]:
    """Makes Python switch threads as often as the interpreter can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("switching_at_every_chance")
def test_two_sessions_save_one_tensor_at_the_same_time() -> None:
    """To recognize a tensor, the runtime changes its version counter and restores it. The other thread must not see
    that."""
    shared, problems = torch.randn(64), []

    def train() -> None:
        session = offload(device=_C.SimDevice(), min_bytes=0, limits=Limits(offload_window=1))
        weight = torch.ones(64, requires_grad=True)
        try:
            for _ in range(300):
                with session:
                    torch.stack([shared * weight for _ in range(3)]).sum().backward()
        except BaseException as error:
            problems.append(repr(error))
        finally:
            session.close()

    threads = [threading.Thread(target=train) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    assert shared._version == 0


def test_two_threads_each_with_its_own_session() -> None:
    problems: list[str] = []

    def train(index: int) -> None:
        device = _C.OrderingChecker(_C.SimDevice(schedule=SCHEDULES[index], seed=index))
        session = offload(device=device, min_bytes=0, limits=Limits(offload_window="16KiB", reload_window="16KiB"))
        try:
            for _ in range(6):
                start.wait()
                with session:
                    ours = outcome(steps[index], [models[index]])
                problems.extend(differences(expected[index], ours))
                assert_nothing_alive(session)
        except BaseException as error:
            problems.append(repr(error))
            start.abort()
        finally:
            session.close()

    def make_step(model: nn.Module, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        def step() -> torch.Tensor:
            loss: torch.Tensor = model(x).square().sum()
            loss.backward()
            return loss

        return step

    models = [small_resnet(), small_resnet()]
    steps = [make_step(model, images()) for model in models]
    expected = [outcome(step, [model]) for step, model in zip(steps, models, strict=True)]
    start = threading.Barrier(2, timeout=PATIENCE_S)
    threads = [threading.Thread(target=train, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []


def module_hooks() -> int:
    hooks = torch.nn.modules.module
    return len(hooks._global_forward_hooks) + len(hooks._global_forward_pre_hooks)


def test_a_session_on_two_threads_keeps_its_hooks_until_the_last_has_left(session: Session) -> None:
    before = module_hooks()
    both_inside, first_has_left = threading.Event(), threading.Event()
    models = [small_resnet(), small_resnet()]
    kept = []

    def first() -> None:
        with session:
            models[0](images())
            assert both_inside.wait(60)
        first_has_left.set()

    def second() -> None:
        with session:
            both_inside.set()
            assert first_has_left.wait(60)
            assert module_hooks() == before + 2
            models[1](images()).sum().backward()
            kept.extend(
                buffer.untyped_storage() in session._engine.modules.parameters for buffer in models[1].buffers()
            )

    on_threads(first, second)
    assert module_hooks() == before
    assert kept
    assert all(kept), "the second thread's buffers were known after the first had left"
    assert_nothing_alive(session)


def test_a_session_is_left_on_the_thread_that_entered_it(session: Session) -> None:
    def leave() -> None:
        session.__exit__(None, None, None)

    with session, pytest.raises(VdnnError, match="exit a vdnn session on the thread that entered it, the last"):
        on_threads(leave)
    small_resnet()(images()).sum().backward()
    assert session.counters.saves == 0


@pytest.mark.usefixtures("switching_at_every_chance")
def test_threads_that_save_first_at_the_same_time_open_one_device(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = []
    native_device = Engine._native_device

    def counted(self: Engine, device: torch.device) -> tuple[_C.Device | None, bool]:
        opened.append(device)
        give_way()
        return native_device(self, device)

    monkeypatch.setattr(Engine, "_native_device", counted)
    start = threading.Barrier(4, timeout=PATIENCE_S)

    def train() -> None:
        model = small_resnet()
        with session:
            start.wait()
            model(images()).sum().backward()

    on_threads(*[train] * 4)
    assert len(opened) == 1


class Queue:
    """A lock that knows how many threads have come to it."""

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock
        self.came = 0

    def __enter__(self) -> None:
        self.came += 1
        self._lock.acquire()

    def __exit__(self, *exception: object) -> None:
        self._lock.release()


def test_threads_that_enter_first_at_the_same_time_share_one_engine(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the fix a thread read that the session has no engine, waited for the thread that made it, and made another
    one, which the session then never closed."""
    queue = Queue(threading.Lock())
    made: list[Engine] = []
    initialise = Engine.__init__

    def initialised_last(self: Engine, options: EngineOptions) -> None:
        made.append(self)
        deadline = time.monotonic() + PATIENCE_S
        while queue.came < 2 and time.monotonic() < deadline:
            time.sleep(0)
        initialise(self, options)

    monkeypatch.setattr(Engine, "__init__", initialised_last)
    for module in (engine_module, session_module):
        monkeypatch.setattr(module, "choosing", queue)
    session._engine_or_none = None

    def enter() -> None:
        with session:
            pass

    on_threads(enter, enter)
    assert queue.came == 2
    assert made == [session._engine]


def give_way() -> None:
    """Lets the other threads run for a while."""
    for _ in range(50):
        time.sleep(0)


class GivesWay:
    """A transfer queue that lets the other threads run within a reload."""

    def __init__(self, queue: _C.TransferQueue) -> None:
        self._queue = queue

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)

    def reload(self, *args: Any, **options: Any) -> _C.Reload:
        reload = self._queue.reload(*args, **options)
        give_way()
        return reload


@pytest.mark.usefixtures("switching_at_every_chance")
def test_two_threads_that_use_one_storage_at_once_reload_it_once(
    open_session: OpenSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the fix each thread issued a reload, and both used the later one, which neither had waited for."""
    initialise = Transport.__init__

    def initialised(self: Transport, *args: Any, **options: Any) -> None:
        initialise(self, *args, **options)
        self.queue = GivesWay(self.queue)  # type: ignore[assignment]

    monkeypatch.setattr(Transport, "__init__", initialised)
    session = open_session(offload_window=1, reload_window=1)
    start = threading.Barrier(2, timeout=PATIENCE_S)
    weights = [torch.ones(64, requires_grad=True) for _ in range(2)]
    for _ in range(10):
        with session:
            shared = torch.randn(64)
            expected = shared.clone()
            losses = [(shared * weight).sum() for weight in weights]
            del shared
            passed_by = [torch.ones(64) * weights[0] for _ in range(2)]  # these hooks release the source
        before = session.counters.reloads

        def backward(loss: torch.Tensor) -> Callable[[], None]:
            def run() -> None:
                start.wait()
                loss.backward()

            return run

        on_threads(*map(backward, losses))
        assert session.counters.reloads == before + 1
        for weight in weights:
            assert weight.grad is not None
            assert torch.equal(weight.grad, expected)
            weight.grad = None
        del passed_by, losses
        assert alive(session) == {}


@pytest.mark.parametrize("meanwhile", [ManagedStorage.release_unused_reload, ManagedStorage.reload_early])
def test_a_prefetched_storage_that_ends_while_another_thread_finds_it_leaves_the_window_once(
    open_session: OpenSession, monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[ManagedStorage], object]
) -> None:
    """A weak reference still finds an object while its finalizer runs. Before the fix both subtracted its bytes."""
    found = []
    remove = TableEntry.remove

    def found_meanwhile(entry: TableEntry[ManagedStorage]) -> None:
        managed = entry.found()
        if managed is not None and managed.reloaded is not None:
            found.append(managed.nbytes)
            meanwhile(managed)
        remove(entry)

    monkeypatch.setattr(TableEntry, "remove", found_meanwhile)
    session = open_session(offload_window=1, reload_window="64KiB")
    with session:
        weight = torch.ones(64, requires_grad=True)
        losses = [(torch.randn(64) * weight).sum() for _ in range(6)]
        losses.pop().backward()
        assert (
            sum(transport.reload_in_flight_bytes for transport in session._engine.transports.values() if transport) > 0
        )
        losses.clear()
    assert found
    assert alive(session) == {}


def test_backward_runs_on_another_thread_than_forward(session: Session) -> None:
    model, x = small_resnet(), images()

    def step() -> torch.Tensor:
        loss: torch.Tensor = model(x).square().sum()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        return loss

    assert_same_as_plain(session, step, model)
