"""Settled steps whose plan offloads all that it can, away from the points of saves and uses: the gate itself moves it.

Their storages have several saves, some through views, and several uses. Every device is checked for the order of
accesses.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import vdnn
from tests.runtime.rigs.settled_steps import settling_of
from vdnn._C import Device, OrderingChecker, SimDevice
from vdnn.runtime.session.light_storages import LightStorages
from vdnn.runtime.session.session import Session
from vdnn.runtime.steps.steps import StepWatch
from vdnn.runtime.storage.transport import Transport
from vdnn.step.plan import Absence, Action, Plan, PlannedLifetime, PlannedPoint
from vdnn.step.recording import PointKind, Recording

LAYERS, _WIDTH, _BATCH = 8, 24, 32
_AWAY = 3
_LEARNED = 5

OfValue = Callable[[torch.Tensor], torch.Tensor]


class Model:
    """Each layer saves its input twice, its result twice, and the result once more as a transposed view."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.weights = [(torch.randn(_WIDTH, _WIDTH, generator=generator) / 5).requires_grad_() for _ in range(LAYERS)]
        self.x = torch.randn(_BATCH, _WIDTH, generator=generator)

    def forward(self, within: OfValue = lambda y: y) -> torch.Tensor:
        """`within` sees the value between the two middle layers."""
        y = self.x
        for number, weight in enumerate(self.weights):
            y = torch.tanh(y @ weight)
            y = y + 0.1 * (y.sin() * y.cos()) @ (y.t() @ y)[:_WIDTH, :_WIDTH]
            if number == LAYERS // 2:
                y = within(y)
        return y.square().mean()

    def gradients(self) -> list[torch.Tensor]:
        found = [weight.grad for weight in self.weights]
        for weight in self.weights:
            weight.grad = None
        return [torch.zeros(()) if gradient is None else gradient for gradient in found]

    def step(self, within: OfValue = lambda y: y) -> list[torch.Tensor]:
        self.forward(within).backward()
        return self.gradients()


class PartsModel(Model):
    """Its operations save parts of storages, and permuted tensors."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(4)
        self.weights = [
            (torch.randn(_WIDTH, 3 * _WIDTH, generator=generator) / 5).requires_grad_() for _ in range(LAYERS)
        ]

    def forward(self, within: OfValue = lambda y: y) -> torch.Tensor:
        y = self.x
        for number, weight in enumerate(self.weights):
            heads = (y @ weight).view(_BATCH, 3, 4, _WIDTH // 4).permute(1, 2, 0, 3)
            query, key, value = heads
            y = (query * key.sin() + value * value).exp().tanh().permute(1, 0, 2).reshape(_BATCH, _WIDTH)
            if number == LAYERS // 2:
                y = within(y)
        return y.square().mean()


class NoisyModel(Model):
    """Its operation saves noise that its kernel draws only after the save. The noise has no grad_fn."""

    def forward(self, within: OfValue = lambda y: y) -> torch.Tensor:
        torch.manual_seed(0)
        y = self.x
        for weight in self.weights:
            y = torch.nn.functional.rrelu(y @ weight, 0.1, 0.9, training=True)
        return within(y).square().mean()


def same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def plan_that_spreads(recording: Recording) -> Plan:
    """Offloads each lifetime from a few points after its last save until a few points before its first use."""
    points = tuple(PlannedPoint(point.kind, point.lifetime, point.key) for point in recording.points)
    saves: dict[int, int] = {}
    for index, point in enumerate(points):
        if point.kind is PointKind.SAVE and point.lifetime is not None:
            saves[point.lifetime] = index
    lifetimes = []
    for number, lifetime in enumerate(recording.lifetimes):
        release = max(saves[number], lifetime.copy_point) + _AWAY
        reload = min(lifetime.uses, default=0) - _AWAY
        absences = (Absence(release, reload),) if release < reload else ()
        lifetimes.append(PlannedLifetime(lifetime.nbytes, Action.OFFLOAD if absences else Action.KEEP, absences))
    return Plan("spread", "cpu", "sim", None, points, tuple(lifetimes))


@dataclass
class HandedOver:
    """The lifetimes that Python continued with."""

    lifetimes: list[int]


@contextlib.contextmanager
def light_session(
    monkeypatch: pytest.MonkeyPatch, native: Device | None = None, make: type[Model] = Model, **options: Any
) -> Iterator[tuple[Session, Model, HandedOver]]:
    """A session in which the next step of the model is settled, and what it hands over."""
    with vdnn.VirtualMachine("titan-x", fake=False) as machine:
        model = make()
        with vdnn.offload("keep", device=machine, recompute=False, min_bytes=0, measure=True) as recorded:
            for _ in range(2):
                model.step()
                recorded.step()
        recording = recorded.recording
    assert recording is not None
    handed_over = HandedOver([])
    hand_over = LightStorages._hand_over

    def noted(light: LightStorages, event: Any, *rest: Any) -> Any:
        handed_over.lifetimes.append(event.lifetime)
        return hand_over(light, event, *rest)

    monkeypatch.setattr(LightStorages, "_hand_over", noted)
    device: Any = OrderingChecker(native or SimDevice())
    plan = plan_that_spreads(recording)
    with vdnn.offload(device=device, plan=plan, min_bytes=0, recompute=False, **options) as session:
        for _ in range(_LEARNED):
            model.step()
            session.step()
        yield session, model, handed_over
    monkeypatch.undo()


def light_lifetimes(session: Session) -> set[int]:
    """The lifetimes that the gate moves in the settled step that runs."""
    followed = settling_of(session).followed
    assert followed is not None, "the step is not settled"
    return {event.lifetime for event in followed.script.events if event.moving is not None}


def transport_of(session: Session) -> Transport:
    steps = session._engine.steps
    assert isinstance(steps, StepWatch)
    assert steps.transport is not None
    return steps.transport


def host_bytes(session: Session) -> int:
    """The bytes of host memory that copies of the session hold."""
    transport = transport_of(session)
    transport.release_sources()
    transport.queue.collect()
    return int(transport.pool.stats.live_bytes)
