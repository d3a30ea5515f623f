"""The ways in which a training's state leaves the device: a contract of training state runs over all of them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.runtime.training_state.loops import Training

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
ways_on_the_device = pytest.mark.parametrize("way", ON_THE_DEVICE)


def options_of(way: str, model: Any) -> dict[str, Any]:
    return {**WAYS[way], **({"model": model} if "parameters" in WAYS[way] else {})}


def options_for(way: str, training: Training) -> dict[str, Any]:
    """Freezes a parameter where the way is one of frozen parameters."""
    if "frozen" in way:
        training.model.get_parameter("between.weight").requires_grad_(False)
    return options_of(way, training.model)
