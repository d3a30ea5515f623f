"""A session for each epoch, each with a device of its own: the optimizer's state follows from one to the next.

`device="sim"` makes a simulated device in each session, as sessions on a GPU that share no engine open it anew.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import vdnn
from tests.conftest import open_fake_device
from tests.fake_driver.control import FakeDriver
from tests.runtime.training_state.ways import WAYS, options_of
from vdnn.runtime.machine.virtual_machine import VirtualMachine
from vdnn.runtime.training_state.optimizer_state import state_of

EPOCHS, STEPS = 3, 2
pytestmark = pytest.mark.usefixtures("one_form_of_the_step")


class Training:
    def __init__(self, width: int = 16) -> None:
        torch.manual_seed(3)
        layers = nn.Linear(8, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 4)
        self.model = nn.Sequential(*layers)
        self.model[2].requires_grad_(False)
        trained = [one for one in self.model.parameters() if one.requires_grad]
        self.optimizer = torch.optim.Adam(trained, lr=0.01, foreach=False)

    def step(self) -> None:
        self.model(torch.randn(6, 8)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def result(self) -> list[torch.Tensor]:
        states = [one for parameter in self.model.parameters() for one in self.optimizer.state[parameter].values()]
        return [one.detach().clone() for one in (*self.model.parameters(), *states)]


def _assert_plain(training: Training, way: str, steps: int = EPOCHS * STEPS) -> None:
    alone = Training(training.model[0].out_features)
    for _ in range(steps):
        alone.step()
    for one, plain in zip(training.result(), alone.result(), strict=True):
        assert torch.equal(one, plain)


def _session(training: Training, way: str, **options: Any) -> vdnn.Session:
    given = {
        "device": "sim",
        "min_bytes": 0,
        "optimizer": training.optimizer,
        **options_of(way, training.model),
        **options,
    }
    return vdnn.offload(**given)


@pytest.mark.parametrize("ends", ["dropped", "kept", "closed"])
@pytest.mark.parametrize("way", WAYS)
def test_epochs_train_as_one_session_does(way: str, ends: str) -> None:
    training = Training()
    kept = []
    for _ in range(EPOCHS):
        session = _session(training, way)
        with session:
            for _ in range(STEPS):
                training.step()
        if ends == "kept":
            kept.append(session)
        elif ends == "closed":
            session.close()
    assert (state_of(training.optimizer).moved.host_bytes > 0) is (ends != "closed")
    _assert_plain(training, way)


@pytest.mark.parametrize("way", WAYS)
def test_the_first_session_closed_in_the_second_leaves_the_state_with_that_one(way: str) -> None:
    training = Training()
    first = _session(training, way)
    with first:
        training.step()
    with _session(training, way):
        training.step()
        held = state_of(training.optimizer).moved.host_bytes
        first.close()
        assert state_of(training.optimizer).moved.host_bytes == held > 0
        training.step()
    _assert_plain(training, way, 3)


@pytest.mark.parametrize("way", WAYS)
def test_each_session_pins_the_state_in_its_own_pool(way: str) -> None:
    training = Training()
    with _session(training, way) as first:
        training.step()
    with _session(training, way) as second:
        (earlier,), (now,) = first._engine.transports.opened(), second._engine.transports.opened()
        assert earlier.state_bytes == 0
        assert now.state_bytes >= state_of(training.optimizer).moved.host_bytes > 0


def test_a_state_dict_of_the_first_epoch_sees_the_steps_of_the_second() -> None:
    alone = Training()
    alone.step()
    plain = alone.optimizer.state_dict()
    alone.step()
    training = Training()
    with _session(training, "state"):
        training.step()
    saved = training.optimizer.state_dict()
    with _session(training, "state") as second:
        training.step()
    second.close()  # the state is back, and nobody has memory that either of the two has pinned
    gc.collect()
    for number, state in plain["state"].items():
        for name, value in state.items():
            assert torch.equal(saved["state"][number][name], value), "as in plain PyTorch, it sees the second step"


def test_a_session_without_room_on_the_host_leaves_the_state_on_the_device() -> None:
    training = Training(width=64)
    with _session(training, "state"):
        training.step()
    with _session(training, "state", policy="keep", limits=vdnn.Limits(host_budget="4KiB")) as session:
        training.step()
    assert "stay" in session.report()
    _assert_plain(training, "state", 2)


def test_two_models_in_turn_in_each_epoch() -> None:
    one, other = Training(), Training()
    for _ in range(EPOCHS):
        for training in (one, other):
            torch.manual_seed(5)
            with _session(training, "state"):
                training.step()
    both = Training(), Training()
    for _ in range(EPOCHS):
        for training in both:
            torch.manual_seed(5)
            training.step()
    for training, plain in zip((one, other), both, strict=True):
        assert all(map(torch.equal, training.result(), plain.result()))


@pytest.mark.parametrize("way", ["state", "deferred", "deferred, gradients"])
def test_what_numpy_writes_to_the_state_in_the_second_epoch_is_kept(way: str) -> None:
    """State that followed to another device is asked for its holders as any other."""

    def run(is_managed: bool) -> list[torch.Tensor]:
        training, found = Training(), list[torch.Tensor]()
        parameter = training.model[0].weight
        for _ in range(EPOCHS):
            with _session(training, way) if is_managed else contextlib.nullcontext():
                training.step()
                array = training.optimizer.state[parameter]["exp_avg"].numpy()
                training.step()
                array *= 0.5
                found.append(torch.from_numpy(array).clone())
                training.step()
                del array
        return found + training.result()

    assert all(map(torch.equal, run(True), run(False)))


def test_a_session_nested_in_one_of_another_device() -> None:
    one, other = Training(), Training()
    plain = Training()
    for _ in range(2):
        torch.manual_seed(5)
        plain.step()
        for training in (one, other):
            torch.manual_seed(5)
            with _session(one, "state"), _session(other, "gradients"):
                training.step()
    assert all(map(torch.equal, one.result(), plain.result()))
    assert all(map(torch.equal, other.result(), plain.result()))


@pytest.mark.parametrize("backward", ["in both", "in the outer one", "outside"])
@pytest.mark.parametrize("ways", [("all", "all"), ("all", "gradients"), ("gradients", "all")])
def test_two_models_under_one_loss_in_sessions_of_two_devices(ways: tuple[str, str], backward: str) -> None:
    def run(is_managed: bool) -> list[torch.Tensor]:
        one, other = Training(), Training()
        head = nn.Linear(4, 8)
        if not is_managed:
            outer: Any = contextlib.nullcontext()
            inner: Any = contextlib.nullcontext()
        else:
            outer = _session(one, ways[0], policy="vdnn-all")
            inner = _session(other, ways[1], policy="vdnn-all")
        for step in range(3):
            torch.manual_seed(step)
            with contextlib.ExitStack() as both:
                both.enter_context(outer)
                with inner:
                    loss = other.model(head(one.model(torch.randn(6, 8)))).square().mean()
                    if backward == "in both":
                        loss.backward()
                if backward == "in the outer one":
                    loss.backward()
            if backward == "outside":
                loss.backward()
            for training in (one, other):
                training.optimizer.step()
                training.optimizer.zero_grad()
        return [*one.result(), *other.result()]

    assert all(map(torch.equal, run(True), run(False)))


def test_epochs_on_machines_of_their_own() -> None:
    training = Training()
    for _ in range(EPOCHS):
        with VirtualMachine("h100", fake=False) as machine, _session(training, "gradients", device=machine) as session:
            for _ in range(STEPS):
                training.step()
            assert session.host_bytes > 0
    _assert_plain(training, "gradients")


@contextlib.contextmanager
def _opened(driver: FakeDriver) -> Iterator[Any]:
    with contextlib.closing(open_fake_device(driver)) as device:
        yield device


@pytest.mark.parametrize("way", WAYS)
def test_epochs_on_devices_of_a_driver(way: str, fake_driver: FakeDriver) -> None:
    training = Training()
    with contextlib.ExitStack() as devices:
        for _ in range(EPOCHS):
            device = devices.enter_context(_opened(fake_driver))
            with _session(training, way, device=device):
                for _ in range(STEPS):
                    training.step()
            fake_driver.hold_streams()
        _assert_plain(training, way)
        training.optimizer.state.clear()
    assert fake_driver.leaks() == {}
