"""The runtime on a GPU whose streams are delayed at random: the bits are those of plain PyTorch, whichever stream is
late.

Sleeps of random length are put on the compute stream and on both copy streams, before modules and during the backward,
as on a busy machine. Work that nothing orders then runs in another order, and gradients or hashes show it. Every test
runs on a virtual machine too. `VDNN_DELAY_SEEDS` sets the number of schedules.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tests.conftest import require_cuda
from tests.runtime.rigs.side_by_side import assert_nothing_alive, differences, outcome
from tests.runtime.rigs.trained_models import MODELS, cnn
from tests.runtime.rigs.training_places import CudaPlace, Place, VirtualPlace
from vdnn import _C
from vdnn.runtime.machine.virtual_machine import VirtualMachine
from vdnn.runtime.session.session import Session

SEEDS = range(int(os.environ.get("VDNN_DELAY_SEEDS", "3")))
MOST_NS = 2_000_000


@pytest.fixture(params=["virtual", pytest.param("cuda", marks=pytest.mark.gpu)])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        with contextlib.ExitStack() as stack:
            if request.param == "cuda":
                require_cuda()
                if not torch.cuda.is_available():
                    pytest.skip(f"torch {torch.__version__} sees no GPU")
                yield CudaPlace()
                return
            schedule = _C.Schedule.RANDOM
            yield VirtualPlace(stack.enter_context(VirtualMachine("h100", fake=False, schedule=schedule)))
    finally:
        torch.use_deterministic_algorithms(False)


class Delays:
    """Delays streams of the session at random points, drawn from the seed."""

    def __init__(self, place: Place, session: Session, seed: int) -> None:
        self._place = place
        self._session = session
        self._draw = random.Random(seed)
        self.count = 0

    def maybe(self, *_: object) -> None:
        if self._draw.random() < 0.5:
            return
        duration_ns = self._draw.randint(1_000, MOST_NS)
        transports = self._session._engine.transports.opened()
        streams: list[tuple[_C.Device, _C.Stream | None]] = [
            (one.device, stream)
            for one in transports
            for stream in (None, one.queue.offload_stream, one.queue.reload_stream)
        ]
        if streams:
            self._place.delay(*self._draw.choice(streams), duration_ns)
            self.count += 1

    @contextlib.contextmanager
    def of(self, model: nn.Module) -> Iterator[None]:
        """Adds delays around every module in the forward pass, and before the gradient of its output in the backward
        pass."""

        def behind(module: nn.Module, args: object, made: Any) -> None:
            self.maybe()
            if isinstance(made, torch.Tensor) and made.requires_grad:
                made.register_hook(self.maybe)

        modules = [module for module in model.modules() if not list(module.children())]
        handles = [module.register_forward_pre_hook(self.maybe) for module in modules]
        handles += [module.register_forward_hook(behind) for module in modules]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def backward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x).float().square().mean()
    loss.backward()  # type: ignore[no-untyped-call]
    return loss


@pytest.mark.parametrize("policy", ["vdnn-all", "recompute-all"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_the_plain_ones_whichever_stream_is_late(place: Place, name: str, policy: str) -> None:
    model, x = MODELS[name](place)
    plain = outcome(lambda: backward(model, x), [model])
    session = place.open(policy, integrity=True)
    delayed = 0
    for seed in SEEDS:
        delays = Delays(place, session, seed)
        with session, delays.of(model):
            ours = outcome(lambda: backward(model, x), [model])
        place.synchronize()
        assert differences(plain, ours) == [], f"seed {seed}"
        delayed += delays.count
    session.step()
    said = re.search(r"integrity: (\d+) storages compared, 0 differ", session.report())
    assert said is not None, session.report()
    assert int(said[1]) > 0
    assert delayed >= len(SEEDS)
    assert session.counters.storages, session.report()
    assert_nothing_alive(session)
    place.close()


class NobodyWaits:
    """A queue that never waits for its reloads: every test in this file must find this fault."""

    def __init__(self, queue: _C.TransferQueue) -> None:
        self._queue = queue

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)

    def wait(self, reload: _C.Reload, stream: _C.Stream) -> None:
        """Returns without waiting."""


def test_a_missing_wait_is_found(place: Place) -> None:
    model, x = cnn(place)
    plain = outcome(lambda: backward(model, x), [model])
    session = place.open()
    with session:
        outcome(lambda: backward(model, x), [model])  # opens the session's queue
    place.synchronize()
    (transport,) = session._engine.transports.opened()
    queue, transport.queue = transport.queue, NobodyWaits(transport.queue)  # type: ignore[assignment]
    found = []
    for seed in SEEDS:
        delays = Delays(place, session, seed)
        with session, delays.of(model):
            ours = outcome(lambda: backward(model, x), [model])
        place.synchronize()
        found += differences(plain, ours)
    transport.queue = queue
    assert found
