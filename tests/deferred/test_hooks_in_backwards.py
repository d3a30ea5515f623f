"""Backwards of a device run on threads of their own: a session notices there if one saves something that is new."""

from __future__ import annotations

import importlib

import pytest
import torch

import vdnn
from deferred.deferred_accelerator import DeferredAccelerator
from tests.deferred.gauges import DeferredGauges
from tests.runtime.rigs.networks import perceptron

SAVES_FROM = 5  # this step on


def test_nodes_that_a_thread_of_the_device_makes_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hooks are away from a backward that saved nothing. From one step on each backward saves, as a reentrant
    checkpoint's does: in the next one they are there, and stay."""
    had_hooks: list[bool] = []
    step = 0

    def look(_: torch.Tensor) -> None:
        had_hooks.append(torch._C._autograd._top_saved_tensors_default_hooks(True) is not None)

    def save(_: torch.Tensor) -> None:
        if step >= SAVES_FROM:
            with torch.enable_grad():
                torch.ones(3, device="deferred", requires_grad=True).square()

    with DeferredAccelerator() as accelerator:
        opening = importlib.import_module("vdnn.runtime.session.offload")
        monkeypatch.setattr(
            opening, "_gauges", lambda _, one: DeferredGauges(one.torch_device, one.device, accelerator)
        )
        model = perceptron().to("deferred")
        with vdnn.offload(device=accelerator, budget="64MiB", min_bytes=0):
            for _ in range(9):
                first = model[0](torch.randn(4, 16, device="deferred"))
                first.register_hook(save)
                last = model[1:](first)
                last.register_hook(look)
                last.sum().backward()
                step += 1
    assert not all(had_hooks[:SAVES_FROM]), "where nothing is saved, no hooks"
    assert had_hooks[SAVES_FROM + 1 :] == [True] * 3, "in the next backward they are there"
