"""Sessions that are left and dropped without close(): what they own is freed at once, without the garbage collector."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.conftest import open_fake_device
from tests.fake_driver.control import FakeDriver
from tests.runtime.training_state.ways import WAYS, options_of
from vdnn.errors import VdnnError
from vdnn.runtime.machine.virtual_machine import VirtualMachine
from vdnn.runtime.session.offload import offload
from vdnn.runtime.session.session import Session
from vdnn.step.plan import Plan

_MANY = 2000


@pytest.fixture(autouse=True)
def _without_the_collector() -> Iterator[None]:
    """Without the collector, only the last reference frees an object. What torch imports at the first step of a process
    leaves frames that hold the optimizer."""
    Training().step()
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Training:
    """A perceptron, and its optimizer."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32), nn.Tanh())
        self.optimizer = torch.optim.Adam(self.model.parameters(), foreach=False)

    def step(self) -> None:
        self.model(torch.ones(8, 16)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def _plan() -> Plan:
    training = Training()
    with VirtualMachine("h100", fake=False) as machine:
        with offload(budget="min", device=machine, min_bytes=0) as session:
            for _ in range(3):
                training.step()
        assert session.plan is not None
        return session.plan


def _threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def _are_at_most(threads: int) -> bool:
    """The kernel lists a thread for a moment after another one has joined it."""
    until = time.monotonic() + 10
    while _threads() > threads:
        if time.monotonic() > until:
            return False
        time.sleep(0.001)
    return True


def _mappings() -> int:
    """The mappings of this process: each slab of pinned memory and each stack of a thread is one or more."""
    return len(Path("/proc/self/maps").read_text().splitlines())


OF_A_SESSION: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "checked": lambda: {"integrity": True},
    "recomputes": lambda: {"policy": "recompute-all"},
    "plan": lambda: {"plan": _plan()},
}


def _options(way: str, training: Training) -> dict[str, Any]:
    """Options of a session without training state, and with it."""
    if way in OF_A_SESSION:
        return OF_A_SESSION[way]()
    return {"optimizer": training.optimizer, **options_of(way, training.model)}


def _engine_of(session: Session) -> weakref.ref[object]:
    return weakref.ref(session._engine)


@pytest.mark.parametrize("way", [*OF_A_SESSION, *WAYS])
def test_a_session_that_is_dropped_frees_its_threads_and_its_memory(way: str) -> None:
    def run(training: Training, options: dict[str, Any]) -> tuple[list[weakref.ref[object]], int]:
        with offload(device="sim", min_bytes=0, **options) as session:
            training.step()
            training.step()
            (transport,) = session._engine.transports.opened()
            watched: list[Any] = [session._engine, session._engine.packer, transport.pool, transport.device]
            return [weakref.ref(one) for one in watched], _threads()

    training = Training()
    options = _options(way, training)
    before = _threads()
    references, inside = run(training, options)
    training.optimizer.state.clear()
    del training
    options.clear()
    assert inside > before, "a session has threads of its own"
    assert [reference() for reference in references] == [None] * len(references)
    assert _threads() == before


@pytest.mark.parametrize("way", OF_A_SESSION)
def test_a_graph_keeps_what_it_needs_of_a_session_that_is_gone(way: str) -> None:
    training, plain = Training(), Training()
    plain.model.load_state_dict(training.model.state_dict())
    options = _options(way, training)
    before = _threads()
    with offload(device="sim", min_bytes=0, **options) as session:
        loss = training.model(torch.ones(8, 16)).square().sum()
    engine, packer = _engine_of(session), weakref.ref(session._engine.packer)
    del session
    assert engine() is None
    assert packer() is not None
    loss.backward()
    plain.model(torch.ones(8, 16)).square().sum().backward()
    for one, other in zip(training.model.parameters(), plain.model.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)
    del loss
    assert packer() is None
    assert _threads() == before


def test_a_graph_that_is_freed_inside_of_a_hook_frees_its_session_at_the_next_one() -> None:
    """The last storage of the first session is freed while a hook of the same session runs."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    with offload(device="sim", min_bytes=0) as session:
        kept = [model(torch.ones(2, 4))]
    packer = weakref.ref(session._engine.packer)
    hooks = packer()
    del session
    assert hooks is not None
    with hooks.saves.lock:  # as a hook does
        kept.clear()
    del hooks
    assert packer() is not None
    with offload(device="sim"):
        pass
    assert packer() is None


def test_a_session_that_another_thread_drops_frees_what_it_owns() -> None:
    references: list[weakref.ref[object]] = []

    def work() -> None:
        training = Training()
        for _ in range(3):
            with offload(device="sim", min_bytes=0) as session:
                training.step()
            references.append(_engine_of(session))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert [reference() for reference in references] == [None] * 3


def _trained(way: str) -> tuple[Session, list[weakref.ref[object]]]:
    """A session that was left, and its model, optimizer and parameters."""
    training = Training()
    options = {"model": training.model, **options_of(way, training.model)}
    with offload(device="sim", min_bytes=0, optimizer=training.optimizer, **options) as session:
        for _ in range(3):
            training.step()
    watched: list[Any] = [training.model, training.optimizer, *training.model.parameters()]
    return session, [weakref.ref(one) for one in watched]


@pytest.mark.parametrize("way", WAYS)
def test_a_closed_session_does_not_hold_its_model(way: str) -> None:
    session, references = _trained(way)
    session.close()
    assert [reference() for reference in references] == [None] * len(references)
    assert session.report().startswith("policy vdnn-all: ")
    with pytest.raises(VdnnError, match="the optimizer of this session is gone"):
        session.__enter__()


def test_a_closed_session_of_frozen_parameters_does_not_hold_its_model() -> None:
    model = Training().model.requires_grad_(False)
    with offload(device="sim", min_bytes=0, model=model, parameters="frozen") as session:
        pass
    session.close()
    reference = weakref.ref(model)
    del model
    assert reference() is None
    with pytest.raises(VdnnError, match="the model of this session is gone"):
        session.__enter__()


def test_a_closed_session_whose_parameters_leave_as_needed_does_not_hold_its_model() -> None:
    def trained(machine: VirtualMachine) -> tuple[Session, weakref.ref[object]]:
        model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)])
        optimizer = torch.optim.Adam(model.parameters(), foreach=False)
        options: dict[str, Any] = {"model": model, "optimizer": optimizer, "min_bytes": 0}
        with offload(budget="1700KiB", device=machine, **options) as session:
            for _ in range(4):
                model(torch.ones(8, 256)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        assert "parameters leave the device" in session.report()
        return session, weakref.ref(model[0].weight)

    with VirtualMachine("h100", fake=False) as machine:
        session, reference = trained(machine)
        session.close()
        assert reference() is None
        with pytest.raises(VdnnError, match="is gone"):
            session.__enter__()


@pytest.mark.parametrize("parameters", ["frozen", "all"])
def test_a_list_of_modules_that_nobody_else_holds_serves_each_entry_of_its_session(parameters: str) -> None:
    first, second = Training(), Training()
    models = [first.model.requires_grad_(parameters == "all"), second.model]
    optimizers = [one.optimizer for one in (first, second)]
    options: dict[str, Any] = {"device": "sim", "min_bytes": 0, "parameters": parameters, "optimizer": optimizers}
    session = offload("vdnn-all", model=nn.ModuleList(models), **options)
    with contextlib.closing(session):
        for _ in range(3):
            with session:
                second.model(first.model(torch.ones(8, 16)).mean(1, keepdim=True).expand(8, 16)).sum().backward()
                for optimizer in optimizers:
                    optimizer.step()
        assert "crossed the link" in session.report()


def test_sessions_on_a_virtual_machine_that_share_nothing_are_freed() -> None:
    training = Training()
    with VirtualMachine("h100", fake=False) as machine:
        references, threads = [], []
        for _ in range(3):
            with offload("vdnn-all", device=machine, measure=True, min_bytes=0) as session:
                training.step()
                training.step()
            references.append(_engine_of(session))
            del session
            threads.append(_threads())
        assert [reference() for reference in references] == [None] * 3
        assert threads[1:] == threads[:1] * 2, "the streams of one session are those of the next"


def test_the_ninth_kind_of_sessions_on_a_machine_frees_the_first() -> None:
    training = Training()
    with VirtualMachine("h100", fake=False) as machine:
        references = []
        for warmup in range(1, 10):
            with offload(budget="1GiB", device=machine, warmup_steps=warmup, min_bytes=0) as session:
                training.step()
            references.append(_engine_of(session))
            del session
        assert references[0]() is None
        assert all(reference() is not None for reference in references[1:])


def test_a_dropped_session_returns_its_memory_to_the_driver(fake_driver: FakeDriver) -> None:
    device = open_fake_device(fake_driver)
    training = Training()
    with offload(device=device, min_bytes=0) as session:
        training.step()
        assert fake_driver.live("pinned_ranges") > 0
    del session
    assert fake_driver.live("pinned_ranges") == 0
    streams = fake_driver.live("stream")
    for _ in range(3):
        with offload(device=device, min_bytes=0):
            training.step()
    assert fake_driver.live("stream") == streams, "each session takes those that the one before gave back"
    del device
    assert fake_driver.leaks() == {}


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def machine(request: pytest.FixtureRequest) -> Iterator[VirtualMachine | None]:
    """A virtual machine for the way "machine", whose sessions share its device."""
    if request.node.callspec.params["way"] != "machine":
        yield None
        return
    with VirtualMachine("h100", fake=False) as machine:
        yield machine


@pytest.mark.parametrize("count", [60, pytest.param(_MANY, marks=pytest.mark.full)])
@pytest.mark.parametrize("way", ["plain", "plan", "state", "machine"])
def test_many_sessions_in_turn_need_no_more_than_one(way: str, count: int, machine: VirtualMachine | None) -> None:
    """Counts threads and mappings, which the collector could free, after each session, and resident memory at the end
    with the collector as Python has it."""
    gc.enable()
    training = Training()
    options = {"policy": "vdnn-all", "measure": True} if machine is not None else _options(way, training)
    threads, mappings, resident = 0, 0, 0
    for number in range(count):
        with offload(device=machine or "sim", min_bytes=0, **options):
            training.step()
        if number < min(100, count // 2):
            threads, mappings, resident = _threads(), _mappings(), _resident_bytes()
        else:
            assert _are_at_most(threads)
    assert _mappings() - mappings < 20
    assert _resident_bytes() - resident < 20 << 20
