"""The ways in which a training's state leaves the device: a contract of training state runs over all of them."""

from __future__ import annotations

import contextlib
import random
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.runtime.training_state.loops import Training
from vdnn.runtime.session.engine import Engine
from vdnn.runtime.training_state.state_room import StateKind

# As "all", but after each step others of the parameters, gradients and states stay on the device.
SOME_STAY = "all, some stay"
WAYS: dict[str, dict[str, Any]] = {
    "state": {},
    "gradients": {"gradients": True},
    "frozen": {"parameters": "frozen"},
    "all": {"parameters": "all"},
    "deferred": {"optimizer_step": "deferred"},
    "deferred, frozen": {"optimizer_step": "deferred", "parameters": "frozen"},
    "deferred, gradients": {"optimizer_step": "deferred", "gradients": True},
    "on the cpu": {"optimizer_on": "cpu"},
    "all, on the cpu": {"parameters": "all", "optimizer_on": "cpu"},
}
ON_THE_DEVICE = [way for way in WAYS if "cpu" not in way]
ways = pytest.mark.parametrize("way", WAYS)
ways_of_bits = pytest.mark.parametrize("way", [*WAYS, SOME_STAY])
ways_on_the_device = pytest.mark.parametrize("way", ON_THE_DEVICE)


def options_of(way: str, model: Any) -> dict[str, Any]:
    if way == SOME_STAY:
        return {"parameters": "all", "model": model}
    return {**WAYS[way], **({"model": model} if "parameters" in WAYS[way] else {})}


def options_for(way: str, training: Training) -> dict[str, Any]:
    """Freezes a parameter where the way is one of frozen parameters."""
    if "frozen" in way:
        training.model.get_parameter("between.weight").requires_grad_(False)
    return options_of(way, training.model)


@contextlib.contextmanager
def what_stays_changes(seed: int = 7) -> Iterator[list[int]]:
    """After each step of an optimizer other parameters, gradients and states stay on the device, or none. Each engine
    draws the same. Yields how many parameters stayed each time, and gradients of optimizers without these."""
    draws: weakref.WeakKeyDictionary[Engine, random.Random] = weakref.WeakKeyDictionary()
    stepped, found = Engine._optimizer_stepped, list[int]()

    def changed(self: Engine, optimizer: torch.optim.Optimizer, *_: object) -> None:
        stepped(self, optimizer)
        room, drawn = self.state_room, draws.setdefault(self, random.Random(seed))
        if drawn.random() < 1 / 3:
            room.leave()
            return

        def some(away: list[tuple[int, int]]) -> set[int]:
            return {identity for identity, _ in away if drawn.random() < 2 / 3}

        for model in self._managed_parameters():
            model.keep(some(model.bytes_away()))
            staying = {id(one.parameter) for one in model._away.values() if one.stays}
            room.staying[StateKind.PARAMETERS] |= staying
            found.append(len(staying))
        for state in self._managed_states():
            room.staying[StateKind.GRADIENTS] |= some(state.gradients.bytes_away())
            room.staying[StateKind.STATE] |= some(state.bytes_away())
        if not self._managed_parameters():
            found.append(sum(map(len, room.staying.values())))

    Engine._optimizer_stepped = changed  # type: ignore[method-assign]
    try:
        yield found
    finally:
        Engine._optimizer_stepped = stepped  # type: ignore[method-assign]
