"""What a plan rebuilds: step time and peak as foretold, gradients of plain torch, clear words where it cannot be."""

from __future__ import annotations

import dataclasses
import gc
import logging
from typing import Any

import pytest
import torch
from torch import nn

import vdnn
from tests.runtime.conftest import OpenSession
from tests.runtime.networks import conv_chain, images
from tests.runtime.side_by_side import alive, assert_nothing_alive, assert_same_as_plain
from tests.runtime.virtual_training import MODELS, train, trained_virtually
from vdnn.errors import IntegrityError, VdnnError
from vdnn.hardware import load_profile
from vdnn.planning.costs import profile_costs
from vdnn.planning.footprint import offload_everything
from vdnn.planning.planned_step import plan_step
from vdnn.planning.rebuilding import candidates_of, planned_rebuild, with_rebuilds
from vdnn.planning.simulate import simulate
from vdnn.recording import Recording
from vdnn.runtime.recompute import table
from vdnn.runtime.session import Session
from vdnn.runtime.virtual_machine import VirtualMachine
from vdnn.step_plan import Action, Plan, PlannedLifetime, make_plan

COSTS = profile_costs(load_profile("titan-x"))


def recording_of(name: str) -> Recording:
    recording = trained_virtually(name).recording
    assert recording is not None
    return recording


def rebuild_all(recording: Recording, *, offload_rest: bool) -> Plan:
    """All that can be is rebuilt; the rest stays, or leaves as often as it can."""
    chosen = set(candidates_of(recording))
    followed = with_rebuilds(recording, chosen)
    rest = offload_everything(followed)
    lifetimes = tuple(
        planned_rebuild(one)
        if index in chosen
        else rest[index]
        if offload_rest
        else PlannedLifetime(one.nbytes, Action.KEEP)
        for index, one in enumerate(recording.lifetimes)
    )
    return make_plan(followed, "everything", lifetimes)


@pytest.mark.parametrize("offload_rest", [False, True], ids=["keep", "offload"])
@pytest.mark.parametrize("name", MODELS)
def test_the_step_runs_as_foretold(name: str, offload_rest: bool) -> None:
    """To the nanosecond and the byte, at every point; and not one save differs from the plan."""
    recording = recording_of(name)
    plan = rebuild_all(recording, offload_rest=offload_rest)
    foretold = simulate(recording, plan, COSTS)
    session = trained_virtually(name, plan)
    executed = session.timeline
    assert executed is not None
    assert executed.step_ns == foretold.step_ns
    assert executed.peak_bytes <= foretold.peak_bytes, "where another holder lets go amid an interval it is less"
    assert [(mark.point, mark.begin_ns, mark.end_ns) for mark in executed.marks] == [
        (mark.point, mark.begin_ns, mark.end_ns) for mark in foretold.marks
    ]
    assert executed.copies == foretold.copies
    assert "differs from the plan" not in session.report()
    if candidates_of(recording):
        assert session.counters.rebuilds
    if not offload_rest:
        assert executed.peak_bytes == foretold.peak_bytes


def test_some_of_every_kind_can_be_rebuilt() -> None:
    """Else the test above shows little."""
    operations = {
        lifetime.rebuild.operation for name in MODELS for lifetime in recording_of(name).lifetimes if lifetime.rebuild
    }
    assert len(operations) >= 4, operations


def test_a_recording_made_under_rebuilds_is_the_one_made_without() -> None:
    recording = recording_of("resnet")
    plan = rebuild_all(recording, offload_rest=True)
    again = trained_virtually("resnet", plan).recording
    assert again is not None
    assert [(point.kind, point.lifetime, point.key, point.compute_ns) for point in again.points] == [
        (point.kind, point.lifetime, point.key, point.compute_ns) for point in recording.points
    ]
    assert again.peak_bytes == recording.peak_bytes


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_plain_torch(name: str, schedule: Any) -> None:
    """With real numbers, copies that may run at any time, and hashes of all that moves."""
    with VirtualMachine("titan-x", fake=False) as machine:
        session, _ = train(machine, name)
        session.close()
    assert session.recording is not None
    plan = rebuild_all(session.recording, offload_rest=True)
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


def test_auto_rebuilds_and_is_never_slower_than_moving_alone() -> None:
    recording = recording_of("resnet")
    for share in (0.2, 0.5, 0.8):
        least = max(point.peak_bytes for point in with_rebuilds(recording, candidates_of(recording)).points)
        budget = least + round((recording.peak_bytes - least) * share)
        moved = plan_step(recording, COSTS, budget, "auto-offload")
        planned = plan_step(recording, COSTS, budget, "auto")
        assert planned.timeline.step_ns <= moved.timeline.step_ns
        session = trained_virtually("resnet", planned.plan)
        assert session.timeline is not None
        assert session.timeline.step_ns == planned.timeline.step_ns
        assert session.timeline.peak_bytes <= budget


def test_without_recompute_nothing_is_rebuilt() -> None:
    session = trained_virtually("resnet", recompute=False)
    assert session.recording is not None
    assert not candidates_of(session.recording)


class Dropping(nn.Module):
    """Dropout as a GPU does it: with a mask of booleans, which nothing can be rebuilt from."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.native_dropout(layer(x), 0.3, True)[0].relu()
        return x


def test_masks_are_kept_as_bits(open_session: OpenSession) -> None:
    session = open_session("rebuild-all")
    model, x = Dropping(), torch.randn(9, 32)

    def step() -> torch.Tensor:
        loss: torch.Tensor = model(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        return loss

    assert_same_as_plain(session, step, model)
    assert session.counters.rebuilds >= 8


def test_a_plan_with_masks_as_bits_runs_as_foretold() -> None:
    def steps(plan: Plan | str) -> Session:
        with VirtualMachine("titan-x") as machine:
            model, x = Dropping(), torch.randn(4096, 32)
            with vdnn.offload(plan, device=machine, measure=True, min_bytes=0) as session:
                for _ in range(3):
                    model(x).square().sum().backward()
                    session.step()
        return session

    recording = steps("vdnn-all").recording
    assert recording is not None
    masks = [one for one in recording.lifetimes if one.rebuild is not None and one.rebuild.kept_bytes]
    assert [(one.nbytes, one.rebuild and one.rebuild.kept_bytes) for one in masks] == 4 * [(4096 * 32, 4096 * 4)]
    plan = rebuild_all(recording, offload_rest=False)
    assert sum(one.action is Action.COMPRESS for one in plan.lifetimes) == 4
    foretold, executed = simulate(recording, plan, COSTS), steps(plan).timeline
    assert executed is not None
    assert (executed.step_ns, executed.peak_bytes) == (foretold.step_ns, foretold.peak_bytes)
    assert foretold.peak_bytes < recording.peak_bytes


# Lives.


def test_saves_that_are_used_again_are_rebuilt_again(open_session: OpenSession) -> None:
    """Two backwards over one graph, and a backward of a backward."""
    session = open_session("rebuild-all")
    model, x = conv_chain(), images()

    def step() -> torch.Tensor:
        loss = model(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        (gradient,) = torch.autograd.grad(model(x).square().sum(), [model[0].weight], create_graph=True)
        gradient.square().sum().backward()
        return loss  # type: ignore[no-any-return]

    assert_same_as_plain(session, step, model)
    assert session.counters.rebuilds > session.counters.dropped


def test_a_long_chain_of_rebuilds_needs_no_deep_stack(open_session: OpenSession) -> None:
    """Each map is made from the one before it, all the way from the first: more than Python's stack is deep."""
    session = open_session("rebuild-all")
    x = torch.randn(64, requires_grad=True)

    def step() -> torch.Tensor:
        hidden = x.sin()
        for _ in range(1200):
            hidden = hidden.tanh().mul(2)
            hidden = hidden.sin()
        loss = hidden.sum()
        loss.backward()
        return loss

    assert_same_as_plain(session, step, x)
    assert session.counters.rebuilds > 1000


def test_a_graph_that_dies_frees_what_its_recipes_hold(open_session: OpenSession) -> None:
    session = open_session("rebuild-all")
    gc.disable()
    try:
        with session:
            loss = conv_chain()(images()).square().sum()
            assert session.counters.dropped
            del loss
        assert not any(alive(session).values())
    finally:
        gc.enable()


# Words.


def test_what_a_recipe_reads_must_not_be_modified(open_session: OpenSession) -> None:
    session = open_session("rebuild-all")
    norm = nn.BatchNorm2d(3)
    x = images().requires_grad_()
    with session:
        loss = norm(x).relu().square().sum()
        with torch.no_grad():
            norm.bias.add_(1)
        with pytest.raises((VdnnError, RuntimeError), match="modified"):
            loss.backward()


class WritesBehindAutograd(nn.Module):
    """What nobody saves is changed under no_grad, or through `.data`: no trace of that is in the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(3, 3, 1) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(3) for _ in range(2))
        self.through_data = False
        self.writes = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norms[0](self.convs[0](x)).relu()
        hidden = self.norms[1](self.convs[1](hidden))
        if self.writes and self.through_data:
            hidden.data.add_(0.3)
        elif self.writes:
            with torch.no_grad():
                hidden.add_(0.3)
        result: torch.Tensor = self.convs[2](hidden.relu()).sin().square()
        return result


@pytest.mark.parametrize("through_data", [False, True])
def test_what_is_written_behind_autograd_is_noticed_at_every_place(
    open_session: OpenSession, caplog: pytest.LogCaptureFixture, *, through_data: bool
) -> None:
    """The same recipe is right at the first place and wrong at the second; in a plan, and without."""
    model, x = WritesBehindAutograd(), images()
    model.through_data = through_data

    def step() -> torch.Tensor:
        loss: torch.Tensor = model(x).square().sum()
        loss.backward()
        return loss

    session = open_session("rebuild-all")
    with caplog.at_level(logging.WARNING, "vdnn"):
        assert_same_as_plain(session, step, model)
    assert "bit for bit" in caplog.text
    with VirtualMachine("titan-x", fake=False) as machine:
        model.writes = False
        with vdnn.offload("vdnn-all", device=machine, measure=True, min_bytes=0) as recorded:
            for _ in range(3):
                step()
        model.writes = True
        assert recorded.recording is not None
        plan = rebuild_all(recorded.recording, offload_rest=False)
        assert_same_as_plain(vdnn.offload(plan, device=machine, min_bytes=0), step, model)


def test_integrity_mode_finds_a_write_that_is_not_always_there() -> None:
    model, x = WritesBehindAutograd(), images()
    with VirtualMachine("titan-x", fake=False) as machine:
        model.writes = False
        with vdnn.offload("vdnn-all", device=machine, measure=True, min_bytes=0) as recorded:
            for _ in range(3):
                model(x).sum().backward()
        assert recorded.recording is not None
        plan = rebuild_all(recorded.recording, offload_rest=False)
        with vdnn.offload(plan, device=machine, min_bytes=0, integrity=True) as session:
            model(x).sum().backward()
            session.step()
            model.writes = True
            model(x).sum().backward()
            with pytest.raises(IntegrityError, match="BatchNorm|ReLU|float32"):
                session.step()


def test_a_recipe_that_is_wrong_is_dropped_once_and_said_once(
    open_session: OpenSession, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Proven before it is trusted: here a ReLU that forgets to cut."""
    name = "ReluBackward0"
    wrong = dataclasses.replace(table._TABLE[name], run=lambda call, x: x.clone())
    monkeypatch.setitem(table._TABLE, name, wrong)
    session = open_session("rebuild-all")
    model, x = conv_chain(), images()

    def step() -> torch.Tensor:
        loss = sum(model(x).square().sum() for _ in range(3))
        assert isinstance(loss, torch.Tensor)
        loss.backward()
        return loss

    with caplog.at_level(logging.WARNING, "vdnn"):
        assert_same_as_plain(session, step, model)
    said = [record.getMessage() for record in caplog.records if "bit for bit" in record.getMessage()]
    assert said
    assert len(said) == len(set(said)), "each recipe once"
    assert all("relu" in one for one in said)


def test_a_plan_whose_recipe_fails_here_is_followed_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    recording = recording_of("chain")
    plan = rebuild_all(recording, offload_rest=False)
    monkeypatch.delitem(table._TABLE, "ReluBackward0")
    session = trained_virtually("chain", plan)
    assert "cannot be rebuilt here" in session.report()
    assert session.counters.storages, "the online policy moved it"


def test_bad_input_is_refused() -> None:
    with pytest.raises(TypeError, match="recompute: expected True or False, got 'yes'"):
        vdnn.offload(recompute="yes")  # type: ignore[arg-type]
