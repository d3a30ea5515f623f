"""Parameters that live on the host, on the accelerator: the bits of a training without a session.

Its tensors are on another device than the host's, as CUDA's are: a gradient that comes from the wrong one is seen here,
and a sum that autograd begins anew because its parameter moved. No access is unordered, whenever streams run.
"""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import pytest
import torch
from torch import nn

import vdnn
from tests.deferred.test_optimizer_state import on_cpu
from tests.deferred.test_vdnn_on_it import few_seeds_of
from tests.runtime.training_state import loops
from tests.runtime.training_state.conftest import NARROW
from tests.runtime.training_state.loops import LOOPS, OPTIMIZERS, same
from tests.runtime.training_state.parameters.frozen_loops import made
from vdnn.runtime.training_state import host_step
from vdnn.testing.deferred import DeferredAccelerator, Mode

# Every combination has runs in tests/runtime/training_state, too; each run here draws others of them and of the modes.
pytestmark = pytest.mark.drawn(of=2)


def trained(
    mode: Mode, seed: int, optimizer: str, loop: str, *, is_managed: bool, on: Any = "device", tied: bool = False
) -> Any:
    sessions = contextlib.ExitStack()
    with DeferredAccelerator(mode, seed=seed, capacity="8MiB") as accelerator, sessions:

        def inside(managed: Any, model: nn.Module | None = None) -> Any:
            common: Any = {"device": accelerator, "min_bytes": 0, "limits": NARROW, "optimizer_on": on}
            away: Any = {"model": model, "parameters": "all"} if is_managed else {}
            return sessions.enter_context(
                contextlib.closing(vdnn.offload("vdnn-all", optimizer=managed, **common, **away))
            )

        found = on_cpu(
            loops.train(OPTIMIZERS[optimizer], LOOPS[loop], inside, "deferred", with_model=is_managed, tied=tied)
        )
        accelerator.synchronize()
        assert accelerator.violations == [], f"seed {seed}"
    return found


@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize("optimizer", ["momentum", "adamw-foreach", "third-party"])
@pytest.mark.parametrize("loop", LOOPS)
def test_a_training_has_the_bits_of_one_without_a_session(loop: str, optimizer: str, tied: bool, mode: Mode) -> None:
    expected = trained(mode, 0, optimizer, loop, is_managed=False, tied=tied)
    for seed in few_seeds_of(mode, 3):
        assert same(expected, trained(mode, seed, optimizer, loop, is_managed=True, tied=tied)), f"seed {seed}"


@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
@pytest.mark.parametrize("loop", ["accumulation", "resumed", "scaled_with_a_skipped_step"])
def test_a_step_on_the_cpu_has_the_bits_of_the_same_form_on_the_accelerator(
    optimizer: str, loop: str, mode: Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_step, "_FUSED_ON_THE_CPU", ())
    expected = trained(mode, 0, optimizer, loop, is_managed=False)
    assert same(expected, trained(mode, 1, optimizer, loop, is_managed=True, on="cpu"))


def losses(model: nn.Module, accelerator: DeferredAccelerator, session: Any, loop: str) -> list[Any]:
    """Two micro-batches a step, so that the order of sums shows."""
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.1, momentum=0.9)
    found = []
    with session(model, optimizer):
        for step in range(4):
            for micro in range(2):
                batch = torch.sin(torch.arange(96.0).view(6, 16) + step + 0.3 * micro).to("deferred")
                loss = model(batch).square().mean()
                if loop == "twice in a graph":
                    loss = loss + model(batch.flip(0)).square().mean()
                if loop == "read in between":
                    loss = loss + 1e-2 * sum(one.square().sum() for one in model.parameters())
                loss.backward()
                found.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
    return found + [one.detach().cpu().clone() for one in model.parameters()]


# Frozen ones that are read in between are read on the host, as docs/training-state.md says.
@pytest.mark.parametrize(
    ("parameters", "loop"),
    [*itertools.product(["frozen", "all"], ["plain", "twice in a graph"]), ("all", "read in between")],
)
@pytest.mark.parametrize("model", ["low-rank", "tied", "twice", "checkpointed", "checkpointed-reentrant"])
def test_models_that_use_weights_in_unusual_places_have_the_bits_too(
    model: str, loop: str, parameters: Any, mode: Mode
) -> None:
    def run(*, is_managed: bool) -> list[Any]:
        with DeferredAccelerator(mode, seed=3, capacity="8MiB") as accelerator, contextlib.ExitStack() as sessions:

            def session(model: nn.Module, optimizer: Any) -> Any:
                if not is_managed:
                    return contextlib.nullcontext()
                common: Any = {"device": accelerator, "min_bytes": 0, "model": model, "optimizer": optimizer}
                opened = vdnn.offload("vdnn-all", parameters=parameters, **common)
                return sessions.enter_context(contextlib.closing(opened))

            made_there = made(model).to("deferred")
            if parameters == "all":
                made_there.requires_grad_()
            found = losses(made_there, accelerator, session, loop)
            accelerator.synchronize()
            assert accelerator.violations == []
            return found

    assert same(run(is_managed=False), run(is_managed=True))
