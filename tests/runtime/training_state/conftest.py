"""Sessions that manage optimizers, over every device without a GPU, with windows so narrow that steps have slices."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import vdnn
from tests.conftest import open_fake_device
from tests.drawn import draw_one
from tests.fake_driver.control import FakeDriver
from tests.runtime.training_state.ways import SOME_STAY, what_stays_changes
from vdnn import _C
from vdnn.errors import DriverError
from vdnn.runtime.session.session import Session
from vdnn.runtime.torch_internals.memory_holders import natively_held
from vdnn.runtime.training_state import cpu_steps
from vdnn.runtime.training_state.optimizer_state import state_of
from vdnn.runtime.training_state.state_copies import StateCopies, StateCopy

NARROW = vdnn.Limits(offload_window="2KiB", reload_window="2KiB")
PLACES = ["sim-eager", "sim-lazy", "sim-random", "fake", "fake-late"]

Manage = Callable[[Any], contextlib.AbstractContextManager[Session]]


def open_session(device: _C.Device, optimizer: Any, **options: Any) -> Session:
    common = {"policy": "vdnn-all", "device": device, "min_bytes": 0, "limits": NARROW, "optimizer": optimizer}
    return vdnn.offload(**{**common, **options})


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is marked
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ours = [item for item in items if Path(__file__).parent in item.path.parents]
    draw_one(ours, {"place": {place: f"on-{place}" for place in PLACES}})


@pytest.fixture(autouse=True)
def _nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are not deferred in a process that has compiled code, as another test of this process may have."""
    if dynamo := sys.modules.get("torch._dynamo.utils"):
        monkeypatch.setitem(dynamo.counters["frames"], "total", 0)


@pytest.fixture(autouse=True)
def _some_stay(request: pytest.FixtureRequest) -> Iterator[None]:
    callspec = getattr(request.node, "callspec", None)
    is_asked_for = callspec is not None and callspec.params.get("way") == SOME_STAY
    with what_stays_changes() if is_asked_for else contextlib.nullcontext():
        yield


@pytest.fixture
def one_form_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU torch's fused form would have other bits."""
    monkeypatch.setattr(cpu_steps, "_FUSED_ON_THE_CPU", ())


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, also in a process that was started to ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(params=PLACES, ids=[f"on-{place}" for place in PLACES])
def place(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def device(place: str, request: pytest.FixtureRequest) -> Iterator[_C.Device]:
    """A device that moves bytes; a race on it fails the test."""
    if place.startswith("sim-"):
        schedule = _C.Schedule.__members__[place[4:].upper()]
        checker = _C.OrderingChecker(_C.SimDevice(schedule=schedule, seed=13))
        yield checker
        checker.close()
        assert checker.take_violations() == []
        return
    driver: FakeDriver = request.getfixturevalue("fake_driver")
    made = open_fake_device(driver)
    driver.hold_streams(place == "fake-late")
    yield made
    made.close()


@pytest.fixture
def manage(device: _C.Device) -> Manage:
    """Makes a session that manages an optimizer on `device` and is closed behind it."""

    @contextlib.contextmanager
    def managed(optimizer: Any, **options: Any) -> Iterator[Session]:
        session = open_session(device, optimizer, **options)
        with contextlib.closing(session), session:
            yield session

    return managed


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of every copy on the device become NaN when it is dropped, or has left, and nobody else holds it.
    Returns sizes."""
    release = StateCopies._release
    found: list[int] = []

    def poison_and_release(copies: StateCopies, moving: StateCopy) -> None:
        copies.transport.device.synchronize(moving.complete)
        for tensor in moving.tensors:
            # The tensor and the object that is asked.
            if natively_held(tensor.untyped_storage()._cdata) == 2 and tensor.is_floating_point():
                with torch.no_grad():
                    tensor.fill_(float("nan"))
                found.append(tensor.nbytes)
        release(copies, moving)

    monkeypatch.setattr(StateCopies, "_release", poison_and_release)
    return found


_CALLS_OF_A_QUERY = 6  # with those around it, which set the context and the mode of captures


def reach_fault(driver: FakeDriver, nth: int, calls: list[str]) -> None:
    """Call `nth` of a run fails, where an earlier run made `calls`. A copy is asked for again if it is not over yet,
    which depends on threads. So a run may make fewer calls: then the fault is met here."""
    if driver.faults_pending:
        assert nth > len(calls) - _CALLS_OF_A_QUERY * calls.count("cuEventQuery"), (nth, calls[nth - 1])
    while driver.faults_pending:
        with contextlib.suppress(DriverError):
            open_fake_device(driver).close()


def on_host(optimizer: torch.optim.Optimizer) -> int:
    """The bytes of the optimizer's state that are on the host."""
    return state_of(optimizer).moved.host_bytes
