"""Training state that lives on the host, on the accelerator: the bits of a training without a session.

Its tensors are on another device than the host's, as CUDA's are: a gradient that comes from the wrong one is seen here,
and a sum that autograd begins anew because its parameter moved. No access is unordered, whenever streams run, and
nothing is left allocated but parameters.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
from typing import Any

import pytest
import torch
from torch import nn

import vdnn
from deferred import DeferredAccelerator, Mode
from tests.deferred.test_vdnn_on_it import few_seeds_of
from tests.runtime.training_state.conftest import NARROW, on_host
from tests.runtime.training_state.loops import LOOPS, OPTIMIZERS, begin, same, train
from tests.runtime.training_state.parameters.frozen_loops import made
from tests.runtime.training_state.test_lives import one_step, state_bytes
from tests.runtime.training_state.ways import WAYS, options_for, options_of, ways_on_the_device
from vdnn.runtime.training_state import cpu_steps

# Every combination has runs in tests/runtime/training_state, too; each run here draws others of them and of the modes.
pytestmark = pytest.mark.drawn(of=2)

ADAMW = OPTIMIZERS["adamw"]


def on_cpu(found: Any) -> Any:
    if hasattr(found, "cpu"):
        return found.cpu()
    if isinstance(found, dict):
        return {key: on_cpu(value) for key, value in found.items()}
    return [on_cpu(one) for one in found] if isinstance(found, list) else found


def trained(
    mode: Mode, seed: int, optimizer: str, loop: str, way: str | None, *, tied: bool = False, like: str = ""
) -> Any:
    """Runs a training, without a session if there is no `way`, which then is `like`."""
    sessions = contextlib.ExitStack()
    with DeferredAccelerator(mode, seed=seed, capacity="8MiB") as accelerator, sessions:

        def inside(managed: Any, model: nn.Module) -> Any:
            if "frozen" in (way or like):
                model.get_parameter("between.weight").requires_grad_(False)
            given = {} if way is None else {"optimizer": managed, **options_of(way, model)}
            options: Any = {"device": accelerator, "min_bytes": 0, "limits": NARROW, **given}
            return sessions.enter_context(contextlib.closing(vdnn.offload("vdnn-all", **options)))

        found = on_cpu(train(OPTIMIZERS[optimizer], LOOPS[loop], inside, "deferred", with_model=True, tied=tied))
        accelerator.synchronize()
        assert accelerator.violations == [], f"seed {seed}"
    return found


# Every kind of slice; the loops differ on the program's side only. fused has no kernel for this device.
KINDS = ["momentum", "adamw-foreach", "third-party"]
SOME = ["accumulation", "clipped_by_norm", "scaled_with_a_skipped_step", "resumed"]
CASES = [*itertools.product(WAYS, KINDS, SOME, [False]), *itertools.product(["all"], KINDS, LOOPS, [True])]


@pytest.mark.drawn(of=3)
@pytest.mark.parametrize(("way", "optimizer", "loop", "tied"), CASES)
def test_a_training_has_the_bits_of_one_without_a_session(
    way: str, optimizer: str, loop: str, tied: bool, mode: Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_steps, "_FUSED_ON_THE_CPU", ())
    expected = trained(mode, 0, optimizer, loop, None, tied=tied, like=way)
    for seed in few_seeds_of(mode, 3):
        assert same(expected, trained(mode, seed, optimizer, loop, way, tied=tied)), f"seed {seed}"


@pytest.mark.parametrize("where", ["device", "cpu"])
def test_small_state_and_counts_stay_where_a_step_on_the_device_has_them(where: Any, mode: Mode) -> None:
    """Sessions on the CPU and on the device take turns, with the small half of the state on the device."""
    with DeferredAccelerator(mode, capacity="8MiB") as accelerator:
        training = begin(ADAMW, "deferred")
        kinds = []
        for on in (where, "device"):
            options: Any = {"device": accelerator, "min_bytes": 256, "limits": NARROW, "optimizer_on": on}
            session = vdnn.offload("vdnn-all", optimizer=training.optimizer, **options)
            with contextlib.closing(session), session:
                for _ in range(2):
                    one_step(training)
                states = [one for state in training.optimizer.state.values() for one in state.values()]
                kinds.append([(one.device.type, one.dim()) for one in states])
        assert kinds[0] == kinds[1]
        assert {kind for kind, dim in kinds[0] if dim} == {"cpu", "deferred"}
        del training, states
        assert accelerator.violations == []


def test_between_steps_the_accelerator_holds_no_state(mode: Mode) -> None:
    with DeferredAccelerator(mode, capacity="8MiB") as accelerator:
        training = begin(ADAMW, "deferred")
        bytes_before = accelerator.memory.allocated_bytes
        with vdnn.offload(
            "vdnn-all", device=accelerator, min_bytes=0, limits=NARROW, optimizer=training.optimizer
        ) as session:
            for _ in range(3):
                one_step(training)
                training.found.clear()
                accelerator.synchronize()
                assert on_host(training.optimizer) == state_bytes(training)
                states = [one for state in training.optimizer.state.values() for one in state.values()]
                assert {one.device.type for one in states} == {"cpu"}
            copied = copy.deepcopy(training.optimizer)
            states = [one for state in copied.state.values() for one in state.values() if one.dim()]
            assert {one.device.type for one in states} == {"deferred"}
            del copied, states
        gc.collect()
        assert accelerator.memory.allocated_bytes <= bytes_before + 6 * 8 * 4 + 512  # and the last batch
        session.close()
        states = [one for state in training.optimizer.state.values() for one in state.values() if one.dim()]
        assert {one.device.type for one in states} == {"deferred"}
        del training, states
        assert accelerator.violations == []


@pytest.mark.full
@ways_on_the_device
def test_a_thousand_steps_hold_what_ten_do(way: str) -> None:
    """Bytes of the accelerator, to the byte, behind each hundred steps and at most within them."""
    with DeferredAccelerator(Mode.EARLY, capacity="8MiB") as accelerator:
        training = begin(ADAMW, "deferred")
        options: Any = {"device": accelerator, "min_bytes": 0, "limits": NARROW, "optimizer": training.optimizer}
        session = vdnn.offload("keep", **options, **options_for(way, training))
        with contextlib.closing(session), session:
            found = []
            for step in range(1010):
                if step % 100 == 10:
                    accelerator.synchronize()
                    gc.collect()
                    (transport,) = session._engine.transports.opened()
                    memory, host = accelerator.memory, transport.pool.stats
                    found.append((memory.allocated_bytes, memory.peak_bytes, host.pinned_bytes, host.live_bytes))
                    accelerator.reset_peak()
                one_step(training)
                training.found.clear()
            assert found[2:] == found[1:-1], found
            assert found[0][0] == found[1][0]
        del training, options, session
        assert accelerator.violations == []


@pytest.mark.parametrize("options", [{}, {"gradients": True}, {"optimizer_step": "deferred"}], ids=str)
def test_state_that_the_program_makes_of_state_on_the_host_is_on_the_accelerator_for_the_step(
    options: dict[str, Any], mode: Mode
) -> None:
    """Zeros like a tensor of the state are made where that is. A group that is in no list of the optimizer as the
    session ends is stepped later, outside of it."""

    def run(is_managed: bool) -> Any:
        with DeferredAccelerator(mode, seed=5, capacity="8MiB") as accelerator:
            training = begin(OPTIMIZERS["adamw-foreach"], "deferred")
            optimizer, named = training.optimizer, dict(training.model.named_parameters())
            (group,) = optimizer.param_groups
            late = {**group, "params": [group["params"].pop()]}
            optimizer.param_groups.append(late)
            given = {"optimizer": optimizer, **options} if is_managed else {}

            def reset(name: str) -> None:
                state = optimizer.state[named[name]]
                state["exp_avg"] = torch.ones_like(state["exp_avg"])

            session = vdnn.offload("vdnn-all", device=accelerator, min_bytes=0, limits=NARROW, **given)
            with session:
                for step in range(4):
                    one_step(training)
                    if step == 1:
                        reset("between.weight")
                optimizer.param_groups.pop()
                one_step(training)
                reset("last.weight")
            session.close()
            optimizer.param_groups.append(late)
            one_step(training)
            state = optimizer.state_dict()["state"]
            assert all(one["exp_avg"].device.type == "deferred" for one in state.values())
            found = on_cpu([*training.found, *(one.detach() for one in training.model.parameters()), state])
            accelerator.synchronize()
            assert accelerator.violations == []
        return found

    assert same(run(is_managed=False), run(is_managed=True))


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
@pytest.mark.parametrize(
    "model", ["low-rank", "tied", "twice", "checkpointed", "checkpointed-reentrant", "hooks-of-its-own"]
)
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


@pytest.mark.parametrize("inner", ["vdnn-all", "recompute-all"])
def test_an_inner_session_saves_parameters_that_the_outer_one_streams(inner: str, mode: Mode) -> None:
    """Those of a norm and a convolution are saved themselves."""

    def run(*, is_managed: bool) -> list[torch.Tensor]:
        with DeferredAccelerator(mode, seed=3, capacity="8MiB") as accelerator, contextlib.ExitStack() as sessions:
            torch.manual_seed(0)
            layers = (nn.Linear(16, 16), nn.LayerNorm(16), nn.Unflatten(1, (1, 16)), nn.Conv1d(1, 2, 3), nn.Flatten())
            model = nn.Sequential(*layers, nn.Linear(28, 4)).to("deferred")
            model[1].requires_grad_(False)
            optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.1)
            within: Any = contextlib.nullcontext()
            if is_managed:
                common: Any = {"device": accelerator, "min_bytes": 0}
                outer = vdnn.offload("vdnn-all", model=model, optimizer=optimizer, parameters="all", **common)
                sessions.enter_context(contextlib.closing(outer))
                sessions.enter_context(outer)
                within = sessions.enter_context(contextlib.closing(vdnn.offload(inner, **common)))
            for step in range(3):
                with within:
                    loss = model(torch.sin(torch.arange(64.0).view(4, 16) + step).to("deferred")).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            found = [one.detach().cpu() for one in model.parameters()]
            accelerator.synchronize()
            assert accelerator.violations == []
            return found

    assert same(run(is_managed=False), run(is_managed=True))
