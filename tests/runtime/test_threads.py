"""Hooks belong to a thread, and graphs do not: sessions side by side, and graphs that change threads."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from tests.conftest import SCHEDULES
from tests.runtime.networks import images, small_resnet
from tests.runtime.side_by_side import assert_nothing_alive, assert_same_as_plain, differences, outcome
from vdnn import _C
from vdnn.runtime.session import Session, offload


@pytest.fixture
def switching_at_every_chance() -> Iterator[None]:
    """Python threads give way to each other as often as the interpreter can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("switching_at_every_chance")
def test_two_sessions_save_one_tensor_at_the_same_time() -> None:
    """To recognise a tensor its version counter is moved and put back: the other thread must not see that."""
    shared, problems = torch.randn(64), []

    def train() -> None:
        session = offload(device=_C.SimDevice(), min_bytes=0, offload_window=1)
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
        session = offload(device=device, min_bytes=0, offload_window="16KiB", reload_window="16KiB")
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
    start = threading.Barrier(2, timeout=60)
    threads = [threading.Thread(target=train, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []


def test_backward_runs_on_another_thread_than_forward(session: Session) -> None:
    model, x = small_resnet(), images()

    def step() -> torch.Tensor:
        loss: torch.Tensor = model(x).square().sum()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        return loss

    assert_same_as_plain(session, step, model)
