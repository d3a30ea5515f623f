"""Optimizers whose state lives on the host, on the accelerator: the bits of a step on it without a session.

No access is unordered, whenever streams run, and nothing is left allocated but parameters.
"""

from __future__ import annotations

import contextlib
import copy
import gc
from typing import Any

import pytest
import torch

import vdnn
from tests.deferred.test_vdnn_on_it import few_seeds_of
from tests.runtime.training_state.conftest import NARROW, on_host
from tests.runtime.training_state.loops import LOOPS, OPTIMIZERS, begin, same, train
from tests.runtime.training_state.test_lives import one_step, state_bytes
from vdnn.runtime.training_state import host_step
from vdnn.testing.deferred import DeferredAccelerator, Mode

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
    mode: Mode, seed: int, optimizer: str, loop: str, *, is_managed: bool, on: Any = "device", **options: Any
) -> Any:
    with DeferredAccelerator(mode, seed=seed, capacity="8MiB") as accelerator:

        def inside(managed: Any) -> vdnn.Session:
            return vdnn.offload(
                "vdnn-all",
                device=accelerator,
                min_bytes=0,
                limits=NARROW,
                optimizer=managed if is_managed else None,
                optimizer_on=on,
                **(options if is_managed else {}),
            )

        found = on_cpu(train(OPTIMIZERS[optimizer], LOOPS[loop], inside, "deferred"))
        accelerator.synchronize()
        assert accelerator.violations == [], f"seed {seed}"
    return found


# Every kind of slice; the loops differ on the program's side only. fused has no kernel for this device.
@pytest.mark.parametrize("optimizer", ["momentum", "adamw", "adamw-foreach", "rmsprop", "third-party"])
@pytest.mark.parametrize("loop", ["plain", "resumed", "clipped_by_norm"])
def test_a_training_has_the_bits_of_one_without_a_session(optimizer: str, loop: str, mode: Mode) -> None:
    expected = trained(mode, 0, optimizer, loop, is_managed=False)
    for seed in few_seeds_of(mode, 8):
        assert same(expected, trained(mode, seed, optimizer, loop, is_managed=True)), f"seed {seed}"


@pytest.mark.parametrize("optimizer", ["momentum", "adamw", "adamw-foreach", "third-party"])
@pytest.mark.parametrize("loop", ["plain", "resumed", "scaled_with_a_skipped_step"])
def test_a_step_on_the_cpu_has_the_bits_of_the_same_form_on_the_accelerator(
    optimizer: str, loop: str, mode: Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_step, "_FUSED_ON_THE_CPU", ())
    expected = trained(mode, 0, optimizer, loop, is_managed=False)
    for seed in few_seeds_of(mode, 8):
        assert same(expected, trained(mode, seed, optimizer, loop, is_managed=True, on="cpu")), f"seed {seed}"


@pytest.mark.parametrize("loop", ["accumulation", "clipped_by_norm", "scaled_with_a_skipped_step"])
def test_gradients_on_the_host_have_the_bits_of_gradients_on_the_accelerator(loop: str, mode: Mode) -> None:
    expected = trained(mode, 0, "adamw-foreach", loop, is_managed=False)
    for seed in few_seeds_of(mode, 8):
        found = trained(mode, seed, "adamw-foreach", loop, is_managed=True, gradients=True)
        assert same(expected, found), f"seed {seed}"


@pytest.mark.parametrize("optimizer", ["momentum", "adamw-foreach"])
@pytest.mark.parametrize("loop", ["accumulation", "averaged", "resumed"])
@pytest.mark.parametrize("gradients", [False, True], ids=["", "gradients"])
def test_a_deferred_step_has_the_bits_of_one_at_once(optimizer: str, loop: str, gradients: bool, mode: Mode) -> None:
    expected = trained(mode, 0, optimizer, loop, is_managed=False)
    for seed in few_seeds_of(mode, 8):
        options = {"optimizer_step": "deferred", "gradients": gradients}
        found = trained(mode, seed, optimizer, loop, is_managed=True, **options)
        assert same(expected, found), f"seed {seed}"


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


WAYS: dict[str, dict[str, Any]] = {
    "state": {},
    "gradients": {"gradients": True},
    "all": {"parameters": "all"},
    "deferred": {"optimizer_step": "deferred"},
    "deferred, gradients": {"optimizer_step": "deferred", "gradients": True},
}


@pytest.mark.full
@pytest.mark.parametrize("way", WAYS)
def test_a_thousand_steps_hold_what_ten_do(way: str) -> None:
    """Bytes of the accelerator, to the byte, behind each hundred steps and at most within them."""
    with DeferredAccelerator(Mode.EARLY, capacity="8MiB") as accelerator:
        training = begin(ADAMW, "deferred")
        options: Any = {"device": accelerator, "min_bytes": 0, "limits": NARROW, "optimizer": training.optimizer}
        if way == "all":
            options["model"] = training.model
        session = vdnn.offload("keep", **options, **WAYS[way])
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
