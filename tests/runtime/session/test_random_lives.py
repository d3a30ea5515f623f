"""Steps drawn from everything that a training loop may do: every one is right, and nothing accumulates."""

from __future__ import annotations

import functools
import gc
import random
import threading
from collections import deque
from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.conftest import open_fake_device
from tests.fake_driver.control import LIVE_KINDS, FakeDriver
from tests.runtime.conftest import EITHER_WAY, OpenSession
from tests.runtime.rigs.networks import conv_chain, perceptron, small_resnet
from tests.runtime.rigs.side_by_side import alive, assert_nothing_alive, differences, on_threads, outcome
from vdnn import _C
from vdnn.runtime.session.limits import Limits
from vdnn.runtime.session.offload import offload, paused
from vdnn.runtime.session.session import Session

pytestmark = [pytest.mark.slow, EITHER_WAY]

Step = Callable[[], list[torch.Tensor]]


class Lives:
    """The steps that a loop draws from, over two models for images and one for vectors."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.left: nn.Module = small_resnet(2)
        self.right: nn.Module = conv_chain(2)
        self.flat: nn.Module = perceptron(8, 3)
        self.models = [self.left, self.right, self.flat]

    def noise(self, *size: int) -> torch.Tensor:
        """Draws from a generator of its own, because all threads share torch's own numbers."""
        return torch.randn(*size, generator=torch.Generator().manual_seed(self.draw.getrandbits(32)))

    def loss(self, model: nn.Module) -> torch.Tensor:
        x = self.noise(3, 8) if model is self.flat else self.noise(self.draw.choice([2, 3]), 3, 8, 8)
        loss: torch.Tensor = model(x).square().sum()
        return loss

    def pick(self) -> nn.Module:
        return self.draw.choice(self.models)

    def plain(self) -> list[torch.Tensor]:
        loss = self.loss(self.pick())
        loss.backward()
        return [loss]

    def retained(self) -> list[torch.Tensor]:
        loss = self.loss(self.pick())
        for _ in range(self.draw.randrange(1, 3)):
            loss.backward(retain_graph=True)
        if self.draw.random() < 0.5:
            loss.backward()
        return [loss]

    def double(self) -> list[torch.Tensor]:
        x = self.noise(3, 8).requires_grad_()
        (slope,) = torch.autograd.grad(self.flat(x).square().sum(), x, create_graph=True)
        if self.draw.random() < 0.7:
            slope.square().sum().backward()
        return [slope]

    def dead_branches(self) -> list[torch.Tensor]:
        losses = [self.loss(self.pick()) for _ in range(self.draw.randrange(2, 4))]
        self.draw.choice(losses).backward()
        return losses

    def forwards_first(self) -> list[torch.Tensor]:
        losses = [self.loss(self.pick()) for _ in range(3)]
        self.draw.shuffle(losses)
        for loss in losses:
            loss.backward()
        return losses

    def pipelined(self) -> list[torch.Tensor]:
        waiting: deque[torch.Tensor] = deque()
        for _ in range(6):
            waiting.append(self.loss(self.left))
            if len(waiting) == 4:
                waiting.popleft().backward()
        while waiting:
            waiting.popleft().backward()
        return []

    def interleaved(self) -> list[torch.Tensor]:
        first, second = self.loss(self.left), self.loss(self.right)
        first.backward()
        third = self.loss(self.left)
        second.backward()
        third.backward()
        return [first, second, third]

    def dropped(self) -> list[torch.Tensor]:
        self.loss(self.pick())
        return []

    def part(self) -> list[torch.Tensor]:
        model = self.pick()
        wanted = self.draw.sample(list(model.parameters()), 2)
        return list(torch.autograd.grad(self.loss(model), wanted))

    def half_paused(self) -> list[torch.Tensor]:
        first = self.loss(self.left)
        with paused():
            second = self.loss(self.right)
        (first + second).backward()
        return [first, second]

    def without_gradients(self) -> list[torch.Tensor]:
        with torch.no_grad():
            return [self.loss(self.pick())]

    def interrupted(self) -> list[torch.Tensor]:
        hidden = self.noise(3, 8).requires_grad_().sin()
        hidden.register_hook(_raise)
        loss = self.flat(hidden).square().sum()
        with pytest.raises(KeyError):
            loss.backward()
        return [loss.detach()]

    def elsewhere(self) -> list[torch.Tensor]:
        loss = self.loss(self.pick())
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        return [loss]

    @property
    def steps(self) -> list[Step]:
        return [
            *(self.plain, self.retained, self.double, self.dead_branches, self.forwards_first, self.pipelined),
            *(self.dropped, self.part, self.half_paused, self.without_gradients, self.interrupted, self.elsewhere),
            self.interleaved,
        ]


def _raise(gradient: torch.Tensor) -> None:
    raise KeyError


def tensors_alive() -> int:
    gc.collect()
    return sum(type(thing) in (torch.Tensor, nn.Parameter, torch.UntypedStorage) for thing in gc.get_objects())


def run(lives: Lives, session: Session, count: int) -> None:
    for number in range(count):
        step = lives.draw.choice(lives.steps)
        before = lives.draw.getstate()
        plain = outcome(step, lives.models)
        lives.draw.setstate(before)
        with session:
            ours = outcome(step, lives.models)
        differing = differences(plain, ours)
        assert not differing, f"step {number}, {step.__name__}: {differing}"


@pytest.mark.drawn(of=2)
@pytest.mark.parametrize("windows", [("1KiB", "1KiB"), ("1MiB", "1MiB")], ids=["narrow", "wide"])
def test_a_hundred_random_steps_are_right_and_leave_nothing(
    open_session: OpenSession, windows: tuple[str, str]
) -> None:
    session = open_session(offload_window=windows[0], reload_window=windows[1])
    lives = Lives(seed=3)
    run(lives, session, 20)
    assert_nothing_alive(session)
    tensors = tensors_alive()
    (transport,) = session._engine.transports.values()
    assert transport is not None
    pinned = transport.pool.stats.pinned_bytes
    run(lives, session, 80)
    assert alive(session) == {}, "without the collector's help"
    assert tensors_alive() == tensors
    assert transport.pool.stats.pinned_bytes <= 2 * pinned
    assert len(session._engine.saves.lookahead) <= 64 + 4 * 60, "the order of saves forgets graphs that are gone"


@pytest.mark.full
def test_a_thousand_steps_on_two_threads_in_one_session_give_everything_back(fake_driver: FakeDriver) -> None:
    """The driver counts streams, events and host memory: after the run there are as many as before it."""
    lives = [Lives(seed=11), Lives(seed=12)]
    device = _C.OrderingChecker(open_fake_device(fake_driver))
    session = offload(device=device, min_bytes=0, limits=Limits(offload_window="2KiB", reload_window="6KiB"))

    def train(count: int, *training: Lives) -> dict[str, int]:
        on_threads(*(functools.partial(run, one, session, count) for one in training))
        assert alive(session) == {}, "without the collector's help"
        return {kind: fake_driver.live(kind) for kind in LIVE_KINDS}

    # Events are reused. One loop creates as many as it needs at once, however long it runs. Two loops may create as
    # many as both together, if their most demanding steps ever coincide, and that depends on the machine.
    needed_alone = [train(100, one)["event"] for one in lives]
    early = train(100, *lives)
    tensors = tensors_alive()
    late = train(300, *lives)
    assert tensors_alive() == tensors
    early.pop("event")
    # Free host memory remembers events too, and two threads split it into other pieces than one does: hence the margin.
    assert late.pop("event") <= 1.1 * sum(needed_alone)
    assert late == early
    session.close()
    device.close()
    assert fake_driver.leaks() == {}
    assert device.take_violations() == []
    assert session.counters.reloads > 10_000
