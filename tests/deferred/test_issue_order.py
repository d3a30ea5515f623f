"""The runtime issues the same work to the deferred accelerator, however late that runs, as CudaDevice issues to a
driver.

So the order of copies, records and waits that is proved here is the order that a GPU gets.
"""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import vdnn
from deferred import DeferredAccelerator, Mode
from tests.conftest import open_fake_device
from tests.deferred.models import on_the_accelerator, vectors
from tests.fake_driver.control import FakeDriver
from tests.runtime.rigs.limits import grouped
from tests.runtime.rigs.networks import conv_chain, images, perceptron, small_resnet
from vdnn import _C

CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor], dict[str, Any]]] = {
    "perceptron": (lambda: perceptron(depth=6), vectors, {"offload_window": 1, "reload_window": 1}),
    "conv chain": (conv_chain, images, {"offload_window": 1, "reload_window": 1}),
    "resnet": (small_resnet, images, {}),
    "resnet, windows of a byte": (small_resnet, images, {"offload_window": 1, "reload_window": 1}),
    "resnet, a window for all reloads": (small_resnet, images, {"reload_window": "1MiB"}),
    "integrity": (conv_chain, images, {"offload_window": 1, "integrity": True}),
}


def renamed(issues: list[str]) -> list[str]:
    """Renames streams and events in the order in which they first appear."""
    names: dict[str, str] = {}

    def name(found: re.Match[str]) -> str:
        kind = found[0][1]
        known = Counter(other[1] for other in names)
        return " " + names.setdefault(found[0], f"{kind}{known[kind] + 1}")

    return [re.sub(r" [se]\d+(v\d+)?", name, line) for line in issues]


def steps(model: nn.Module, x: torch.Tensor, session: Any) -> None:
    """Two steps. The second reuses memory that the first released."""
    with session:
        for _ in range(2):
            loss = model(x).square().sum()
            loss.backward()
            model.zero_grad()


def open_session(device: Any, options: dict[str, Any]) -> Any:
    sizes = {"min_bytes": 0, "offload_window": "2KiB", "reload_window": "6KiB", **options}
    return vdnn.offload("vdnn-all", device=device, **grouped(sizes))


@pytest.fixture
def driver() -> Iterator[FakeDriver]:
    driver = FakeDriver()
    driver.reset()
    yield driver
    driver.reset()
    assert driver.leaks() == {}


def issued_to_the_driver(driver: FakeDriver, model: nn.Module, x: torch.Tensor, options: dict[str, Any]) -> list[str]:
    device = open_fake_device(driver)
    session = open_session(device, options)
    steps(copy.deepcopy(model), x.clone(), session)
    # CudaDevice clears a kernel's result before the kernel; the accelerator does not.
    issues = [line for line in driver.issues() if not line.startswith("memset")]
    session.close()
    device.close()
    return renamed(issues)


def issued_to_the_accelerator(
    model: nn.Module, x: torch.Tensor, options: dict[str, Any], mode: Mode, seed: int
) -> list[str]:
    with DeferredAccelerator(mode, seed=seed, capacity="8MiB") as accelerator:
        there, x_there = on_the_accelerator(model, x)
        log = _C.IssueLog(accelerator.device)
        accelerator.device = log
        session = open_session(accelerator, options)
        steps(there, x_there, session)
        issues = log.take_issues()
        session.close()
        del there, x_there, session
        assert accelerator.violations == []
    return renamed(issues)


@pytest.mark.parametrize("held", [False, True], ids=["driver-runs-at-once", "driver-holds-back"])
@pytest.mark.parametrize("name", CASES)
def test_the_order_of_stream_operations_is_what_a_driver_is_given(driver: FakeDriver, name: str, held: bool) -> None:
    make, make_input, options = CASES[name]
    model, x = make(), make_input()
    driver.hold_streams(held)
    expected = issued_to_the_driver(driver, model, x, options)
    kinds = Counter(line.split()[0] for line in expected)
    assert min(kinds[kind] for kind in ("record", "wait", "copy_d2h", "copy_h2d")) > 4, kinds
    for mode in Mode:
        for seed in range(10 if mode is Mode.RANDOM else 1):
            assert issued_to_the_accelerator(model, x, options, mode, seed) == expected, (mode, seed)


def test_a_wait_that_is_left_out_is_seen(driver: FakeDriver) -> None:
    expected = issued_to_the_driver(driver, small_resnet(), images(), {})
    without = [line for line in expected if line != next(line for line in expected if line.startswith("wait"))]
    assert renamed(without) != expected


def test_a_log_says_what_was_put_on_streams_and_refuses_what_its_device_refuses() -> None:
    log = _C.IssueLog(_C.SimDevice())
    left, right = log.create_stream("left"), log.create_stream("right")
    memory, host = log.allocate_device(64), log.allocate_pinned(64)
    log.copy_async(host, memory, 64, _C.CopyDirection.DEVICE_TO_HOST, right)
    first, second = log.record(right), log.record(right)
    log.wait(left, second)
    log.wait(left, first)
    log.wait(left, _C.Event())
    log.drain(left)
    with pytest.raises(Exception, match="pinned"):
        log.copy_async(memory, memory, 64, _C.CopyDirection.DEVICE_TO_HOST, left)
    assert log.take_issues() == ["copy_d2h s1 64", "record s1 e1", "record s1 e2", "wait s2 e2", "wait s2 e1"]
    assert log.take_issues() == []
    log.close()
    assert log.closed
