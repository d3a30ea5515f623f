"""The runtime on the accelerator: every step gives the same numbers as without the runtime.

No access is unordered, and nothing is left allocated. Each test runs for as many seeds as VDNN_DEFERRED_SEEDS says.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import vdnn
from deferred import DeferredAccelerator, Mode
from tests.deferred.models import MODELS, on_the_accelerator, step_of, vectors
from tests.runtime.rigs.limits import grouped
from tests.runtime.rigs.lives import LIVES
from tests.runtime.rigs.networks import conv_chain, images, perceptron, small_resnet
from tests.runtime.rigs.side_by_side import alive, differences, outcome
from tests.runtime.rigs.virtual_training import train as train_virtually
from tests.runtime.session.test_topologies import TOPOLOGIES
from vdnn.planning.footprint import interval_bytes, offload_everything
from vdnn.planning.search.prefix_cut import prefix_cut
from vdnn.runtime.session.session import Session

SEEDS = range(int(os.environ.get("VDNN_DEFERRED_SEEDS", "10")))

Step = Callable[[], torch.Tensor | Sequence[torch.Tensor]]
# Makes the step from models and inputs that are on the accelerator.
MakeStep = Callable[..., Step]


def seeds_of(mode: Mode) -> Sequence[int]:
    return SEEDS if mode is Mode.RANDOM else SEEDS[:1]  # the other modes draw nothing


def few_seeds_of(mode: Mode, of_fifty: int) -> Sequence[int]:
    """A share of the seeds, for tests that run in many forms."""
    return seeds_of(mode)[: max(1, of_fifty * len(SEEDS) // 50)]


def open_session(accelerator: DeferredAccelerator, policy: Any = "vdnn-all", **options: Any) -> Session:
    sizes = {"min_bytes": 0, "offload_window": "2KiB", "reload_window": "6KiB", **options}
    decided = {"plan" if isinstance(policy, vdnn.Plan) else "policy": policy}
    return vdnn.offload(**decided, device=accelerator, **grouped(sizes))


def on_cpu(named: list[tuple[str, torch.Tensor | None]]) -> list[tuple[str, torch.Tensor | None]]:
    return [(name, None if found is None else found.cpu()) for name, found in named]


def assert_same_on_it(
    mode: Mode,
    owners: Sequence[nn.Module],
    inputs: Sequence[torch.Tensor],
    make_step: MakeStep,
    *,
    policy: Any = "vdnn-all",
    steps: int = 2,
    **options: Any,
) -> None:
    """Runs some steps in a session, for every seed, and compares them with a step without a session. No access may be
    unordered, and nothing may be left allocated."""
    plain = plain_outcome(mode, owners, inputs, make_step)
    for seed in seeds_of(mode):
        with DeferredAccelerator(mode, seed=seed, capacity="8MiB") as accelerator:
            there = _copies(owners, inputs)
            before = accelerator.memory.allocated_bytes
            session = open_session(accelerator, policy, **options)
            for _ in range(steps):
                with session:
                    ours = on_cpu(outcome(make_step(*there), there[: len(owners)]))
                assert not differences(plain, ours), f"seed {seed}"
            assert session.counters.storages
            accelerator.synchronize()
            if alive(session):
                gc.collect()
            assert alive(session) == {}
            assert accelerator.memory.allocated_bytes == before
            session.close()
            del there
            assert accelerator.violations == [], f"seed {seed}"


def plain_outcome(
    mode: Mode, owners: Sequence[nn.Module], inputs: Sequence[torch.Tensor], make_step: MakeStep
) -> list[tuple[str, torch.Tensor | None]]:
    """Runs the step once for all seeds: test_faithful shows that its result does not depend on the seed."""
    with DeferredAccelerator(mode, capacity="8MiB") as accelerator:
        there = _copies(owners, inputs)
        plain = on_cpu(outcome(make_step(*there), there[: len(owners)]))
        del there
        assert accelerator.violations == [], "the step itself is wrong"
    return plain


def _copies(owners: Sequence[nn.Module], inputs: Sequence[torch.Tensor]) -> list[Any]:
    return [copied for one in (*owners, *inputs) for copied in on_the_accelerator(one)]


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_the_same_as_without(name: str, mode: Mode) -> None:
    assert_same_on_it(mode, [MODELS[name].make()], [MODELS[name].make_input()], step_of)


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_a_topology_is_the_same_as_without(name: str, mode: Mode) -> None:
    make, make_input = TOPOLOGIES[name]
    assert_same_on_it(mode, [make()], [make_input()], step_of)


@pytest.mark.drawn(of=3)
@pytest.mark.parametrize("life", LIVES)
def test_a_life_is_the_same_as_without(life: str, mode: Mode) -> None:
    step, make_models, make_input = LIVES[life]
    models = [make() for make in make_models]
    assert_same_on_it(mode, models, [make_input()], lambda *there: partial(step, *there))


# Streams.


def used_on(stream: torch.Stream, *tensors: torch.Tensor | None) -> None:
    """Records a stream on tensors, as torch requires when one stream reads what another allocated."""
    for tensor in tensors:
        if tensor is not None:
            tensor.record_stream(stream)


def on_a_side_stream(model: nn.Module, x: torch.Tensor) -> Step:
    """Runs the forward on a side stream, and starts the backward on the default stream."""

    def step() -> torch.Tensor:
        side = torch.Stream(device="deferred")
        main = torch.accelerator.current_stream()
        side.wait_stream(main)
        with side:
            loss: torch.Tensor = model(x).square().sum()
        main.wait_stream(side)
        loss.backward()
        used_on(main, loss, *(weight.grad for weight in model.parameters()))
        return loss

    return step


def half_on_a_side_stream(model: nn.Module, x: torch.Tensor) -> Step:
    """Computes each half of a graph on a stream of its own."""

    def step() -> torch.Tensor:
        side = torch.Stream(device="deferred")
        main = torch.accelerator.current_stream()
        side.wait_stream(main)
        with side:
            hidden = model[:3](x)
        main.wait_stream(side)
        used_on(main, hidden)
        loss: torch.Tensor = model[3:](hidden).square().sum()
        loss.backward()
        used_on(main, *(weight.grad for weight in model.parameters()))
        return loss

    return step


@pytest.mark.parametrize("make_step", [on_a_side_stream, half_on_a_side_stream], ids=lambda made: made.__name__)
def test_streams_of_the_users(make_step: MakeStep, mode: Mode) -> None:
    assert_same_on_it(mode, [perceptron(depth=3)], [vectors()], make_step)


# Options.


@pytest.mark.parametrize("window", [1, "64KiB"])
def test_windows_of_any_size(window: int | str, mode: Mode) -> None:
    assert_same_on_it(mode, [small_resnet()], [images()], step_of, offload_window=window, reload_window=window)


def test_integrity_is_checked_and_kept(mode: Mode) -> None:
    assert_same_on_it(mode, [conv_chain()], [images()], step_of, integrity=True)


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_plan_made_on_a_virtual_machine_is_followed(share: float, mode: Mode) -> None:
    with vdnn.VirtualMachine("titan-x") as machine:
        recording = train_virtually(machine, "perceptron")[0].recording
    assert recording is not None
    plan = plan_for(recording, share)
    torch.manual_seed(3)
    model, x = perceptron(64, 6), torch.randn(128, 64)

    def make_step(there: nn.Module, x_there: torch.Tensor) -> Step:
        def step() -> torch.Tensor:
            optimizer = torch.optim.SGD(there.parameters(), lr=0.01)
            for number in range(2):
                optimizer.zero_grad()
                loss: torch.Tensor = there(x_there).square().sum()
                loss.backward()
                if number == 0:
                    optimizer.step()
            return loss

        return step

    assert_same_on_it(mode, [model], [x], make_step, policy=plan)


def plan_for(recording: Any, share: float) -> vdnn.Plan:
    least = max(interval_bytes(recording, offload_everything(recording)))
    return prefix_cut(recording, least + round(share * (recording.peak_bytes - least)))
