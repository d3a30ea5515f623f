"""The devices that one contract suite runs over, and the settings of hypothesis.

`device` is every implementation of Device: the simulated device under each schedule, CudaDevice on the fake driver
(running as early and as late as is legal), and CudaDevice on a GPU if there is one. With VDNN_REQUIRE_CUDA=1 a machine
without a GPU fails instead of skipping, so that a GPU runner cannot pass by skipping. Each device is closed after its
test, and the fake driver must then count no live objects.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import hypothesis
import pytest
import torch

from tests.drawn import draw_marked
from tests.fake_driver.control import FakeDriver
from tests.patience import PATIENCE_S
from tests.thinned import families, thin
from vdnn import _C

# On CPUs with AVX2 but without AVX-512, torch 2.13's oneDNN writes past its memory in backward of a strided 1 x 1
# convolution with few channels, channels last, on one thread. Its kernels for AVX do not. It reads this once, later.
if torch.backends.cpu.get_cpu_capability() == "AVX2":
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX")

# Two workers with a pool of two threads each would spin on each other's cores: GoogLeNet's step took 3.1 s of CPU time
# with two threads and takes 0.4 s with one. Processes that tests start inherit the variable.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))

hypothesis.settings.register_profile("vdnn", deadline=None, print_blob=True)
hypothesis.settings.load_profile("vdnn")

SCHEDULES = [_C.Schedule.EAGER, _C.Schedule.LAZY, _C.Schedule.RANDOM]
SCHEDULE_IDS = [schedule.name.lower() for schedule in SCHEDULES]


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is marked, and behind the conftest of a folder
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    draw_marked(items)
    if not config.pluginmanager.hasplugin("measured families"):
        thin(items, families())
    if config.pluginmanager.hasplugin("timeout"):  # the machines of benchmarks/gpu_proof have no plugins
        for item in items:
            if starts_processes(item) and not item.get_closest_marker("full"):
                item.add_marker(pytest.mark.timeout(PATIENCE_S + 60))


_STARTERS = {"subprocess", "multiprocessing", "forked", "Ranks", "run_to_its_end"}


def starts_processes(item: pytest.Item) -> bool:
    """Says whether the module of the test starts processes. Each has a limit of its own, which shows both stacks; this
    one is for what waits in another way."""
    return bool(_STARTERS & vars(getattr(item, "module", object)).keys())


@pytest.fixture(autouse=True, scope="module")
def _libraries_are_no_garbage() -> None:
    """Leaves what is there before a module out of the collections of garbage, which sessions and many tests ask for:
    torch and the libraries of the trainers are a million objects."""
    gc.collect()
    gc.freeze()


def require_cuda() -> None:
    """Skips without a GPU, or fails if VDNN_REQUIRE_CUDA requires one."""
    status = _C.driver_status()
    if status["device_count"]:
        return
    if os.environ.get("VDNN_REQUIRE_CUDA") == "1":
        pytest.fail(f"VDNN_REQUIRE_CUDA=1, but there is no GPU: {status['reason']}")
    pytest.skip(f"no GPU: {status['reason']}")


def open_fake_device(fake: FakeDriver) -> _C.CudaDevice:
    return _C.CudaDevice(library=str(fake.path))


@pytest.fixture
def fake_driver() -> Iterator[FakeDriver]:
    """The fake driver, reset. After the test, nothing may be alive in it."""
    gc.collect()
    driver = FakeDriver()
    driver.reset()
    if driver.leaks():  # an earlier test dropped a device without closing it
        open_fake_device(driver).close()
    yield driver
    gc.collect()
    driver.reset()
    if driver.leaks():
        open_fake_device(driver).close()
    assert driver.leaks() == {}


@pytest.fixture(
    params=[
        "sim-eager",
        "sim-lazy",
        "sim-random",
        "fake",
        "fake-late",
        pytest.param("cuda", marks=pytest.mark.gpu),
    ]
)
def device(request: pytest.FixtureRequest) -> Iterator[_C.Device]:
    kind = request.param
    if kind.startswith("sim-"):
        made: _C.Device = _C.SimDevice(schedule=_C.Schedule.__members__[kind[4:].upper()], seed=7)
        yield made
        made.close()
        return
    if kind == "cuda":
        require_cuda()
        made = _C.CudaDevice()
        yield made
        made.close()
        return
    driver: FakeDriver = request.getfixturevalue("fake_driver")
    made = open_fake_device(driver)
    driver.hold_streams(kind == "fake-late")
    yield made
    made.close()
    assert driver.leaks() == {}
