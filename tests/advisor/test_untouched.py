"""vdnn.advise leaves the model, optimizer, loader and every random state unchanged, even if it is interrupted."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

import vdnn
from tests.advisor.programs import BATCH, convolutional, perceptron, pictures, vectors
from vdnn.advisor.host_reads import HostReads
from vdnn.advisor.loop_training import LoopTraining
from vdnn.advisor.observation import observe

pytestmark = pytest.mark.slow


class World:
    """The training and all state that must stay unchanged."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Dropout(0.1), *convolutional(bias=True))
        self.model[3].eval()  # one module in eval mode
        self.generator = torch.Generator().manual_seed(5)
        self.loader = DataLoader(pictures(), batch_size=BATCH, shuffle=True, generator=self.generator)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        x, y = pictures(4)[:4]
        functional.cross_entropy(self.model(x), y).backward()
        self.optimizer.step()  # now there are gradients and optimizer state

    def state(self) -> dict[str, Any]:
        numbers: Any = numpy.random.get_state()
        return {
            "model": copy.deepcopy(self.model.state_dict()),
            "gradients": [copy.deepcopy(one.grad) for one in self.model.parameters()],
            "identities": [id(one) for one in (*self.model.parameters(), *self.model.buffers())],
            "training": [module.training for module in self.model.modules()],
            "forwards": [module.forward for module in self.model.modules()],
            "optimizer": copy.deepcopy(self.optimizer.state_dict()),
            "generator": self.generator.get_state(),
            "torch": torch.get_rng_state(),
            "python": random.getstate(),
            "numpy": [numbers[0], torch.from_numpy(numbers[1].astype("int64")), *numbers[2:]],
            "precision": torch.get_float32_matmul_precision(),
            "anomaly": torch.is_anomaly_enabled(),
        }


def assert_same(one: Any, other: Any, path: str = "") -> None:
    assert type(one) is type(other), path
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other), path
    elif isinstance(one, dict):
        assert list(one) == list(other), path
        for key in one:
            assert_same(one[key], other[key], f"{path}.{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), path
        for number, (left, right) in enumerate(zip(one, other, strict=True)):
            assert_same(left, right, f"{path}[{number}]")
    else:
        assert one == other, path


def disturbing_step(model: Any, optimizer: Any, batch: Any) -> None:
    random.random()
    numpy.random.rand()
    torch.rand(1)
    functional.cross_entropy(model(batch[0]), batch[1]).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


@pytest.mark.parametrize("how", ["loss", "step"])
def test_everything_stays_as_it_was(how: str) -> None:
    world = World()
    before = world.state()
    given: Any = {"loss": functional.cross_entropy} if how == "loss" else {"step": disturbing_step}
    advices = vdnn.advise(world.model, world.loader, world.optimizer, **given, steps=2, hardware="h100")
    assert len(advices) > 0
    assert_same(before, world.state())


@pytest.mark.parametrize("moment", ["in a real step", "in a rehearsal"])
def test_an_interrupt_leaves_everything_as_it_was(moment: str) -> None:
    world = World()
    before = world.state()
    calls = 0

    def step(model: Any, optimizer: Any, batch: Any) -> None:
        nonlocal calls
        disturbing_step(model, optimizer, batch)
        calls += 1
        if calls == (2 if moment == "in a real step" else 4):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        vdnn.advise(world.model, world.loader, world.optimizer, step=step, steps=2, hardware="h100")
    assert_same(before, world.state())
    assert torch.ones(2).sum().item() == 2, "no mode is left behind"


@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1)], ids=["a number", "a tensor"])
def test_a_scheduler_that_the_step_calls_does_not_change_the_rate(rate: Any) -> None:
    model = perceptron(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    before = copy.deepcopy(optimizer.state_dict())

    def step(model: Any, optimizer: Any, batch: Any) -> None:
        functional.cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()

    loader = DataLoader(vectors(), batch_size=BATCH)
    advices = vdnn.advise(model, loader, optimizer, step=step, steps=2, hardware="h100")
    assert advices.step_ns is not None, "rehearsed"
    assert_same(before, optimizer.state_dict())


def test_an_optimizer_that_leaves_its_parameters_out_of_a_copy_steps_on_the_copys() -> None:
    model = perceptron(1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    before = copy.deepcopy(model.state_dict())

    def step(model: Any, optimizer: Any, batch: Any) -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(batch[0]), batch[1])
            loss.backward()
            return loss

        optimizer.step(closure)

    loader = DataLoader(vectors(), batch_size=BATCH)
    advices = vdnn.advise(model, loader, optimizer, step=step, steps=1, hardware="h100")
    assert advices.step_ns is not None, "rehearsed"
    assert_same(before, model.state_dict())


def test_a_comparison_that_differs_is_found() -> None:
    world = World()
    before = world.state()
    with torch.no_grad():
        next(world.model.parameters()).add_(1)
    with pytest.raises(AssertionError, match="model"):
        assert_same(before, world.state())


def test_a_loader_gives_the_same_batches_afterwards() -> None:
    one, other = World(), World()
    observe(LoopTraining(one.model, one.loader, one.optimizer, functional.cross_entropy), 1, HostReads())
    first, second = next(iter(one.loader)), next(iter(other.loader))
    assert torch.equal(first[1], second[1])
