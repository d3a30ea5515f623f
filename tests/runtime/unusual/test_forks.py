"""A forked child that drops its parent's session ends as it would without one.

It joins, waits for and frees nothing of that session, and calls no driver. Each program runs in a process of its own,
because the test process may have threads.
"""

from __future__ import annotations

import tempfile
import textwrap
from pathlib import Path

import pytest

from tests import forked
from tests.fake_driver.control import LIBRARY

pytestmark = pytest.mark.slow

_TRAINED = f"""
import contextlib, gc, os, signal, sys, threading
import torch
import vdnn
from vdnn import _C

signal.alarm(60)  # whoever blocks for ever is ended
torch.set_num_threads(1)
torch.manual_seed(1)
FAKE = {str(LIBRARY)!r}

def devices(kind):
    if kind == "sim":
        return "sim"
    if kind == "checked":
        return _C.OrderingChecker(_C.SimDevice(schedule=_C.Schedule.LAZY))
    if kind == "machine":
        return vdnn.VirtualMachine("titan-x", fake=False)
    return _C.CudaDevice(library=FAKE)

def trained(device, steps=3):
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)], torch.nn.Tanh())
    limits = vdnn.Limits(offload_window="4KiB", reload_window="8KiB")
    session = vdnn.offload("vdnn-all", device=device, min_bytes=0, limits=limits)
    losses = []
    with device if isinstance(device, vdnn.VirtualMachine) else contextlib.nullcontext(), session:
        for _ in range(steps):
            losses.append(model(torch.randn(32, 64)).sum())
            losses[-1].backward()
        losses.append(model(torch.randn(32, 64)).sum())  # whose graph is alive at the fork
    return session, losses

class Threads:
    \"\"\"Their ids are those of threads that the parent had.\"\"\"
    def __enter__(self):
        self.end = threading.Event()
        self.threads = [threading.Thread(target=self.end.wait) for _ in range(8)]
        for one in self.threads:
            one.start()
    def __exit__(self, *_):
        self.end.set()
        for one in self.threads:
            one.join()

def in_a_child(function):
    child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.alarm(30)
            function()
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


def _run(program: str, *arguments: str) -> None:
    source = _TRAINED + textwrap.dedent(program)
    with tempfile.TemporaryDirectory() as folder:
        done = forked.run(forked.run_code, source, *arguments, folder=Path(folder))
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.drawn(of=2)
@pytest.mark.parametrize("kind", ["sim", "checked", "machine", "fake driver"])
def test_a_child_with_threads_drops_a_session(kind: str) -> None:
    program = """
    session, losses = trained(devices(sys.argv[1]))

    def child():
        global session, losses
        with Threads():
            del session, losses
            gc.collect()

    in_a_child(child)
    losses[-1].backward()  # the parent's works on
    """
    _run(program, kind)


@pytest.mark.parametrize("kind", ["sim", "fake driver"])
def test_a_child_drops_a_pool_whose_thread_waits(kind: str) -> None:
    """The condition variable that the pool's thread waits on cannot be destroyed in a process without that thread."""
    program = """
    device = _C.SimDevice() if sys.argv[1] == "sim" else devices("fake")
    pool = _C.PinnedPool(device, cap_bytes=1 << 24)
    pool.reserve(1 << 20)
    pool.wait_for_growth()

    def child():
        global pool, device
        with Threads():
            del pool, device
            gc.collect()

    in_a_child(child)
    pool.allocate(4096)
    pool.close()
    device.close()
    """
    _run(program, kind)


def test_workers_of_a_loader_drop_a_session() -> None:
    program = """
    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return 8
        def __getitem__(self, index):
            global session, losses
            with Threads():
                session = losses = None
                gc.collect()
            return torch.full((3,), float(index))

    session, losses = trained("sim")
    for _ in range(2):
        loader = torch.utils.data.DataLoader(Rows(), batch_size=2, num_workers=2)
        found = torch.cat(list(loader))
        assert torch.equal(found[:, 0], torch.arange(8.0)), found
    losses[-1].backward()
    """
    _run(program)


def test_a_child_calls_no_driver_for_a_device_of_its_parent() -> None:
    """A dropped device is closed soon after, without close(). One of the parent that a child drops is not."""
    program = """
    from tests.fake_driver.control import FakeDriver

    driver = FakeDriver()
    device = devices("fake")
    device.create_stream("held")
    device.allocate_pinned(4096)
    held = driver.leaks()
    assert held

    def child():
        global device
        del device
        gc.collect()
        devices("fake")
        _C.free_parked()
        assert all(driver.leaks().get(kind, 0) >= count for kind, count in held.items()), (held, driver.leaks())

    in_a_child(child)
    assert driver.leaks() == held
    del device
    _C.free_parked()
    assert driver.leaks() == {}
    """
    _run(program)


@pytest.mark.parametrize("entered", [False, True])
def test_a_child_trains_in_a_session_of_its_own(entered: bool) -> None:
    """Forks within the parent's session, or after it."""
    program = """
    session, losses = trained("sim")

    def child():
        global session, losses
        with Threads():
            if sys.argv[1] == "True":
                session.__exit__(None, None, None)
            del session, losses
            gc.collect()
            own, more = trained("sim")
            more[-1].backward()
            assert own.counters.storages

    if sys.argv[1] == "True":
        with session:
            in_a_child(child)
    else:
        in_a_child(child)
    """
    _run(program, str(entered))
