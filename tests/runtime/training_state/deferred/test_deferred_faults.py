"""Faults while steps wait: afterwards model and optimizer are as after the step, or an error says what to load."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

import vdnn
from tests.runtime.training_state.conftest import Manage
from tests.runtime.training_state.loops import OPTIMIZERS, Training, begin, same
from tests.runtime.training_state.test_faults_by_way import evaluate, waiting
from tests.runtime.training_state.test_lives import expected, one_step, outcome
from vdnn.errors import VdnnError
from vdnn.runtime.training_state.host_tensor import HostTensor
from vdnn.runtime.training_state.sliced_step import SlicedStep
from vdnn.runtime.training_state.slices import Slice
from vdnn.runtime.training_state.state_copies import StateCopies, StateCopy

ADAMW = OPTIMIZERS["adamw"]
OUT_OF_MEMORY, INVALID_VALUE = 2, 1


def evaluated(steps: int) -> list[Any]:
    training = begin(ADAMW)
    for _ in range(steps):
        one_step(training)
        evaluate(training)
    return outcome(training)


def test_an_exception_in_the_forward_leaves_the_rest_to_wait(manage: Manage) -> None:
    training = begin(ADAMW)
    with manage(training.optimizer, optimizer_step="deferred"):
        one_step(training)
        one_step(training)
        assert waiting(training) == 10

        def fail(module: torch.nn.Module, args: object) -> None:
            raise ArithmeticError("no")

        handle = training.model.between.register_forward_pre_hook(fail)  # type: ignore[union-attr, operator]
        with pytest.raises(ArithmeticError):
            training.model(torch.ones(2, 8))
        handle.remove()
        assert 0 < waiting(training) < 10
        assert same(outcome(training), expected(2))
        one_step(training)
    assert same(outcome(training), expected(3))


@pytest.mark.parametrize("gradients", [False, True], ids=["", "gradients"])
def test_a_slice_that_fails_at_the_exit_names_what_to_load(
    gradients: bool, manage: Manage, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = begin(ADAMW)

    def failing(sliced: SlicedStep, part: Slice) -> None:
        raise ArithmeticError("no")

    said = "the step of AdamW stopped after 0 of 10 parameters: no. Model and optimizer are between two steps"

    def trained() -> None:
        with manage(training.optimizer, optimizer_step="deferred", gradients=gradients):
            one_step(training)
            one_step(training)
            monkeypatch.setattr(SlicedStep, "step", failing)

    with pytest.raises(VdnnError, match=said):
        trained()
    assert waiting(training) == 0
    assert "state" not in vars(torch.optim.Optimizer)


def test_gradients_are_the_programs_again_after_a_slice_that_failed(
    manage: Manage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that clipping had noted a change of, too, and in a sum with those of a backward after the step."""

    def gradients_of(training: Training) -> list[torch.Tensor]:
        return [one.grad.clone() for one in training.model.parameters() if one.grad is not None]

    def run(inside: Any, *, fails: bool) -> list[torch.Tensor]:
        training = begin(ADAMW)
        model: Any = training.model
        with inside(training.optimizer):
            one_step(training)
            evaluate(training)
            training.loss().backward()
            torch.nn.utils.clip_grad_norm_(training.model.parameters(), 0.01)
            late = model.head.bias.sum()
            training.optimizer.step()
            late.backward()
            if not fails:
                return gradients_of(training)

            def failing(sliced: SlicedStep, part: Slice) -> None:
                raise ArithmeticError("no")

            with monkeypatch.context() as patched:
                patched.setattr(SlicedStep, "step", failing)
                with pytest.raises(VdnnError, match="stopped after 0 of 10 parameters"):
                    training.loss()
            return gradients_of(training)

    plain = run(lambda _: contextlib.nullcontext(), fails=False)
    for gradients in (False, True):
        options = {"optimizer_step": "deferred", "gradients": gradients}
        assert same(plain, run(lambda optimizer, given=options: manage(optimizer, **given), fails=True))


def test_a_slice_without_room_waits_on(manage: Manage, monkeypatch: pytest.MonkeyPatch) -> None:
    training = begin(ADAMW)
    fetch = StateCopies.fetch

    def without_room(copies: StateCopies, hosts: list[HostTensor]) -> StateCopy:
        raise torch.OutOfMemoryError("no room")

    with manage(training.optimizer, optimizer_step="deferred"):
        one_step(training)
        evaluate(training)
        one_step(training)
        monkeypatch.setattr(StateCopies, "fetch", without_room)
        with pytest.raises(torch.OutOfMemoryError):
            training.model(torch.ones(2, 8))
        assert waiting(training) == 10
        monkeypatch.setattr(StateCopies, "fetch", fetch)
        evaluate(training)
        assert same(outcome(training), evaluated(2))


def test_wrong_arguments_are_refused() -> None:
    optimizer = begin(ADAMW).optimizer
    cases: list[tuple[dict[str, Any], str]] = [
        ({"optimizer_step": "later"}, "optimizer_step: expected 'immediate' or 'deferred', got 'later'"),
        ({"optimizer_step": "deferred", "optimizer": None}, "optimizer_step: whose steps are deferred"),
        ({"optimizer_step": "deferred", "optimizer_on": "cpu"}, "and optimizer_on='cpu' takes them to the host"),
    ]
    for options, said in cases:
        with pytest.raises(ValueError, match=said):
            vdnn.offload(**{"device": "sim", "optimizer": optimizer, **options})


def test_several_ranks_are_refused_before_anything_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    training = begin(ADAMW)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    session = vdnn.offload("vdnn-all", device="sim", optimizer=training.optimizer, optimizer_step="deferred")
    with pytest.raises(VdnnError, match="DDP and FSDP read parameters where no hook can step them first"):
        session.__enter__()
    assert "state" not in vars(torch.optim.Optimizer)
    one_step(training)
    assert waiting(training) == 0


def test_nothing_waits_once_something_was_compiled(manage: Manage, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._dynamo.utils

    monkeypatch.setitem(torch._dynamo.utils.counters["frames"], "total", 1)
    training = begin(ADAMW)
    with manage(training.optimizer, optimizer_step="deferred") as session:
        one_step(training)
        assert waiting(training) == 0
        assert "10 parameters were stepped at once in the last step: torch.compile" in session.report()
