"""Plans with recomputes: step time and peak as predicted, gradients as in plain torch, clear messages on failure."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

import vdnn
from tests.runtime.conftest import OpenSession
from tests.runtime.rigs.networks import conv_chain, images
from tests.runtime.rigs.side_by_side import alive, assert_nothing_alive, assert_same_as_plain
from tests.runtime.rigs.virtual_training import (
    MODELS,
    decided_by,
    recompute_all,
    recording_of,
    train,
    trained_virtually,
)
from vdnn.hardware import load_profile
from vdnn.planning.costs import profile_costs
from vdnn.planning.least_memory import least_bytes
from vdnn.planning.planned_step import plan_step
from vdnn.planning.recomputing import candidates_of, with_recomputes
from vdnn.planning.simulate import simulate
from vdnn.runtime.machine.virtual_machine import VirtualMachine
from vdnn.runtime.session.session import Session
from vdnn.step.plan import Action, Plan
from vdnn.step.recording import Recording

COSTS = profile_costs(load_profile("titan-x"))


@pytest.mark.parametrize("offload_rest", [False, True], ids=["keep", "offload"])
@pytest.mark.parametrize("name", MODELS)
def test_the_step_runs_as_predicted(name: str, offload_rest: bool) -> None:
    """The prediction holds to the nanosecond and the byte at every point, and no save differs from the plan."""
    recording = recording_of(name)
    plan = recompute_all(recording, offload_rest=offload_rest)
    predicted = simulate(recording, plan, COSTS)
    session = trained_virtually(name, plan)
    executed = session.timeline
    assert executed is not None
    assert executed.step_ns == predicted.step_ns
    assert executed.peak_bytes <= predicted.peak_bytes, "where another holder lets go amid an interval it is less"
    assert [(mark.point, mark.begin_ns, mark.end_ns) for mark in executed.marks] == [
        (mark.point, mark.begin_ns, mark.end_ns) for mark in predicted.marks
    ]
    assert executed.copies == predicted.copies
    assert "differs from the plan" not in session.report()
    if candidates_of(recording):
        assert session.counters.recomputes
    if not offload_rest:
        assert executed.peak_bytes == predicted.peak_bytes


def test_some_of_every_kind_can_be_recomputed() -> None:
    """Makes sure that the test above covers many operations."""
    operations = {
        lifetime.recompute.operation
        for name in MODELS
        for lifetime in recording_of(name).lifetimes
        if lifetime.recompute
    }
    assert len(operations) >= 4, operations


def test_a_recording_made_under_recomputes_is_the_one_made_without() -> None:
    recording = recording_of("resnet")
    plan = recompute_all(recording, offload_rest=True)
    again = trained_virtually("resnet", plan).recording
    assert again is not None
    assert [(point.kind, point.lifetime, point.key, point.compute_ns) for point in again.points] == [
        (point.kind, point.lifetime, point.key, point.compute_ns) for point in recording.points
    ]
    assert again.peak_bytes == recording.peak_bytes


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_plain_torch(name: str, schedule: Any) -> None:
    """Runs with real numbers, copies that may run at any time, and hashes of everything that is copied."""
    with VirtualMachine("titan-x", fake=False) as machine:
        session, _ = train(machine, name)
        session.close()
    assert session.recording is not None
    plan = recompute_all(session.recording, offload_rest=True)
    with VirtualMachine("titan-x", fake=False, schedule=schedule, seed=5) as machine:
        session, gradients = train(machine, name, plan, integrity=True)
        assert_nothing_alive(session)
        session.close()
    with VirtualMachine("titan-x", fake=False) as machine:
        _, plain = train(machine, name, "keep", measure=False)
    assert "differs from the plan" not in session.report()
    assert all(
        torch.equal(one, other) for one, other in zip(gradients, plain, strict=True) if one is not None is not other
    )


def test_auto_recomputes_and_is_never_slower_than_moving_alone() -> None:
    recording = recording_of("resnet")
    for share in (0.2, 0.6):
        least = max(point.peak_bytes for point in with_recomputes(recording, candidates_of(recording)).points)
        budget = least + round((recording.peak_bytes - least) * share)
        moved = plan_step(recording, COSTS, budget, "auto-offload")
        planned = plan_step(recording, COSTS, budget, "auto")
        assert planned.timeline.step_ns <= moved.timeline.step_ns
        session = trained_virtually("resnet", planned.plan)
        assert session.timeline is not None
        assert session.timeline.step_ns == planned.timeline.step_ns
        assert session.timeline.peak_bytes <= budget


def test_without_recompute_nothing_is_recomputed() -> None:
    session = trained_virtually("resnet", recompute=False)
    assert session.recording is not None
    assert not candidates_of(session.recording)


class Dropping(nn.Module):
    """Dropout as on a GPU: with a boolean mask, which cannot be recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.native_dropout(layer(x), 0.3, True)[0].relu()
        return x


def test_masks_are_kept_as_bits(open_session: OpenSession) -> None:
    session = open_session("recompute-all")
    model, x = Dropping(), torch.randn(9, 32)

    def step() -> torch.Tensor:
        loss: torch.Tensor = model(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        return loss

    assert_same_as_plain(session, step, model)
    assert session.counters.recomputes >= 8


def masked_steps(plan: Plan | str, **options: Any) -> Session:
    with VirtualMachine("titan-x") as machine:
        model, x = Dropping(), torch.randn(4096, 32)
        with vdnn.offload(**decided_by(plan), device=machine, measure=True, min_bytes=0, **options) as session:
            for _ in range(3):
                model(x).square().sum().backward()
                session.step()
    return session


def require_as_predicted(recording: Recording, plan: Plan, session: Session) -> None:
    predicted, executed = simulate(recording, plan, COSTS), session.timeline
    assert executed is not None
    assert (executed.step_ns, executed.peak_bytes) == (predicted.step_ns, predicted.peak_bytes)
    assert executed.copies == predicted.copies
    assert [(mark.point, mark.begin_ns, mark.end_ns) for mark in executed.marks] == [
        (mark.point, mark.begin_ns, mark.end_ns) for mark in predicted.marks
    ]
    assert "differs from the plan" not in session.report()


def test_a_plan_with_masks_as_bits_runs_as_predicted() -> None:
    """The bits may be kept or offloaded. If offloaded, they put an eighth of the masks' bytes on the link."""
    recording = masked_steps("vdnn-all").recording
    assert recording is not None
    masks = [one for one in recording.lifetimes if one.recompute is not None and one.recompute.kept_bytes]
    assert [(one.nbytes, one.recompute and one.recompute.kept_bytes) for one in masks] == 4 * [(4096 * 32, 4096 * 4)]
    count = len(recording.lifetimes)
    for offload_rest in (False, True):
        plan = recompute_all(recording, offload_rest=offload_rest)
        assert sum(one.action is Action.COMPRESS for one in plan.lifetimes) == 4
        wanted = Action.OFFLOAD if offload_rest else Action.KEEP
        assert [(one.nbytes, one.action) for one in plan.lifetimes[count:]] == 4 * [(4096 * 4, wanted)]
        session = masked_steps(plan)
        require_as_predicted(recording, plan, session)
        assert session.timeline is not None
        assert session.timeline.peak_bytes < recording.peak_bytes
        bits = [one.nbytes for one in session.timeline.copies if one.lifetime >= count]
        assert bits == 8 * [4096 * 4] * offload_rest, "each there and back"


@pytest.mark.parametrize("lossy", [None, "bf16", "fp8"], ids=["lossless", "bf16", "fp8"])
def test_auto_moves_what_codecs_leave_and_runs_as_predicted(lossy: str | None) -> None:
    recording = masked_steps("vdnn-all", lossy=lossy).recording
    assert recording is not None
    least, moved = least_bytes(recording), 0
    for share in range(0, 4, 2):
        budget = least + (recording.peak_bytes - least) * share // 5
        planned = plan_step(recording, COSTS, budget, "auto")
        require_as_predicted(recording, planned.plan, masked_steps(planned.plan, lossy=lossy))
        assert planned.timeline.peak_bytes <= budget
        moved += sum(one.action is Action.OFFLOAD for one in planned.plan.lifetimes[len(recording.lifetimes) :])
    assert moved, "else nothing was shown"


# Lifetimes.


def test_saves_that_are_used_again_are_recomputed_again(open_session: OpenSession) -> None:
    """Two backwards over one graph, and a backward of a backward."""
    session = open_session("recompute-all")
    model, x = conv_chain(), images()

    def step() -> torch.Tensor:
        loss = model(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        (gradient,) = torch.autograd.grad(model(x).square().sum(), [model[0].weight], create_graph=True)
        gradient.square().sum().backward()
        return loss  # type: ignore[no-any-return]

    assert_same_as_plain(session, step, model)
    assert session.counters.recomputes > session.counters.discarded


@pytest.mark.slow
def test_a_long_chain_of_recomputes_needs_no_deep_stack(open_session: OpenSession) -> None:
    """Each map is recomputed from the previous one, back to the first: more of them than Python's stack is deep."""
    session = open_session("recompute-all")
    x = torch.randn(64, requires_grad=True)

    def step() -> torch.Tensor:
        hidden = x.sin()
        for _ in range(350):
            hidden = hidden.tanh().mul(2)
            hidden = hidden.sin()
        loss = hidden.sum()
        loss.backward()
        return loss

    assert_same_as_plain(session, step, x)
    assert session.counters.recomputes == session.counters.discarded == 700


def test_a_graph_that_dies_frees_what_its_recipes_hold(open_session: OpenSession) -> None:
    session = open_session("recompute-all")
    gc.disable()
    try:
        with session:
            loss = conv_chain()(images()).square().sum()
            assert session.counters.discarded
            del loss
        assert not any(alive(session).values())
    finally:
        gc.enable()
