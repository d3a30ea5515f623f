"""A hundred steps, each drawn from all that a training loop may do: every one is right, and nothing piles up."""

from __future__ import annotations

import gc
import random
import threading
from collections import deque
from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.runtime.conftest import OpenSession
from tests.runtime.networks import conv_chain, images, perceptron, small_resnet
from tests.runtime.side_by_side import alive, assert_nothing_alive, differences, outcome
from vdnn.runtime.session import Session, paused

Step = Callable[[], list[torch.Tensor]]


class Lives:
    """The steps that the loop draws from, over two models of images and one of vectors."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.left: nn.Module = small_resnet(2)
        self.right: nn.Module = conv_chain(2)
        self.flat: nn.Module = perceptron(8, 3)
        self.models = [self.left, self.right, self.flat]

    def loss(self, model: nn.Module) -> torch.Tensor:
        x = torch.randn(3, 8) if model is self.flat else images(self.draw.choice([1, 2]) + 1)
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
        x = torch.randn(3, 8, requires_grad=True)
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
        hidden = torch.randn(3, 8, requires_grad=True).sin()
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


@pytest.mark.parametrize("windows", [("1KiB", "1KiB"), ("1MiB", "1MiB")], ids=["narrow", "wide"])
def test_a_hundred_random_steps_are_right_and_leave_nothing(
    open_session: OpenSession, windows: tuple[str, str]
) -> None:
    session = open_session(offload_window=windows[0], reload_window=windows[1])
    lives = Lives(seed=3)
    run(lives, session, 20)
    assert_nothing_alive(session)
    tensors = tensors_alive()
    (transport,) = session._transports.values()
    assert transport is not None
    pinned = transport.pool.stats.pinned_bytes
    run(lives, session, 80)
    assert alive(session) == {}, "without the collector's help"
    assert tensors_alive() == tensors
    assert transport.pool.stats.pinned_bytes <= 2 * pinned
    assert len(session._packer._order) <= 64 + 4 * 60, "the order of saves forgets graphs that are gone"
