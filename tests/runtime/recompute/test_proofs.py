"""Recipes that give other values are not used: each is tried for every save key, and failures are reported."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import logging
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

import vdnn
from tests.runtime.conftest import OpenSession
from tests.runtime.rigs.lives import one_backward
from tests.runtime.rigs.networks import conv_chain, images
from tests.runtime.rigs.side_by_side import assert_same_as_plain
from tests.runtime.rigs.virtual_training import recompute_all, recording_of, trained_virtually
from vdnn.errors import IntegrityError, VdnnError
from vdnn.runtime.machine.virtual_machine import VirtualMachine
from vdnn.runtime.recompute import compiled_search, table
from vdnn.runtime.recompute.proofs import Outcome, Proofs, TrialKey
from vdnn.runtime.recompute.recipe import _with_geometry
from vdnn.runtime.recompute.tolerance import Tolerance


def test_without_a_plan_a_parameter_that_nobody_saves_may_be_modified_before_the_backward(
    open_session: OpenSession,
) -> None:
    norm, x = nn.BatchNorm2d(3), images().requires_grad_()

    def step() -> torch.Tensor:
        loss = norm(x).relu().square().sum()
        with torch.no_grad():
            norm.bias.add_(1)
        loss.backward()
        return loss

    assert_same_as_plain(open_session("recompute-all"), step, norm)


def test_under_a_plan_a_recipe_whose_operand_is_modified_for_the_first_time_raises() -> None:
    model, x = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 3, 1)), images()

    def step(*, writes: bool = False) -> None:
        loss = model(x).square().sum()
        if writes:
            with torch.no_grad():
                model[1].bias.add_(1)
        loss.backward()

    with VirtualMachine("titan-x", fake=False) as machine:
        with vdnn.offload("vdnn-all", device=machine, measure=True, min_bytes=0) as recorded:
            for _ in range(3):
                step()
        assert recorded.recording is not None
        plan = recompute_all(recorded.recording, offload_rest=False)
        with vdnn.offload(plan=plan, device=machine, min_bytes=0) as session:
            step()
            assert session.counters.recomputes
            with pytest.raises(RuntimeError, match="modified"):
                step(writes=True)


@pytest.mark.parametrize("through_data", [False, True])
@pytest.mark.parametrize("there_is_a_third", [False, True])
def test_an_operand_that_is_modified_between_two_backward_passes_is_not_recomputed_from(
    through_data: bool, there_is_a_third: bool
) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 3, 1)), images()

    def step() -> list[torch.Tensor]:
        model.zero_grad()
        loss = model(x).square().sum()
        if there_is_a_third:
            loss.backward(retain_graph=True)
        gradients = torch.autograd.grad(loss, model[0].weight, create_graph=True)
        bias = model[1].bias.data if through_data else model[1].bias.detach()
        bias.add_(1)
        (loss + gradients[0].square().sum()).backward()
        return [loss.detach(), *(parameter.grad for parameter in model.parameters())]

    state = copy.deepcopy(model.state_dict())
    plain = [step() for _ in range(5)]
    model.load_state_dict(state)
    with VirtualMachine("titan-x", fake=False) as machine:
        with vdnn.offload("vdnn-all", device=machine, measure=True, min_bytes=0) as recorded:
            ours = [step() for _ in range(3)]
        assert recorded.recording is not None
        plan = recompute_all(recorded.recording, offload_rest=False)
        with vdnn.offload(plan=plan, device=machine, min_bytes=0) as session:
            ours += [step() for _ in range(2)]
    assert session.counters.recomputes
    for one, other in zip(itertools.chain(*plain), itertools.chain(*ours), strict=True):
        assert torch.equal(one, other)


class WritesBehindAutograd(nn.Module):
    """Changes a tensor that is not saved, under no_grad or through `.data`. The graph has no trace of the write."""

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
    """The same recipe is right for the first save and wrong for the second, with a plan and without."""
    model, x = WritesBehindAutograd(), images()
    model.through_data = through_data

    step = partial(one_backward, model, x)
    session = open_session("recompute-all")
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
        plan = recompute_all(recorded.recording, offload_rest=False)
        assert_same_as_plain(vdnn.offload(plan=plan, device=machine, min_bytes=0), step, model)


def test_a_recipe_that_was_right_at_its_use_is_not_tried_at_that_of_later_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[bool] = []
    at_use = Proofs.at_use
    monkeypatch.setattr(Proofs, "at_use", lambda *given: tried.append(at_use(*given)) or tried[-1])  # type: ignore[func-returns-value]
    model, x = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 3, 1)), images()
    found = []
    with VirtualMachine("titan-x", fake=False) as machine:
        with vdnn.offload("keep", device=machine, measure=True, min_bytes=0) as session:
            for _ in range(2):
                model(x).square().sum().backward()
                session.step()
                found.append(list(tried))
                tried.clear()
        assert session.recording is not None
    first, recorded = found
    assert first
    assert all(first)
    assert recorded == []
    assert any(one.recompute is not None for one in session.recording.lifetimes), "what is known is recorded"


def test_a_recipe_that_was_wrong_at_one_size_is_tried_at_its_uses_of_every_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    proofs, outcomes = Proofs(Tolerance(None)), [Outcome.EXACT, Outcome.WRONG]
    managed: Any = SimpleNamespace(nbytes=4, facts=SimpleNamespace(label="a tensor"), transport=None)
    recipe: Any = SimpleNamespace(name="relu", signature="relu")
    monkeypatch.setattr(Proofs, "_try", lambda *_, **__: outcomes.pop(0))
    monkeypatch.setattr("vdnn.runtime.recompute.proofs.trial_bytes", lambda *_: 0)
    trial_keys = [TrialKey((size, cast(Any, size)), ("relu", cast(Any, "form"))) for size in range(3)]
    assert proofs.at_use(managed, recipe, trial_keys[0], cast(Any, None), None)
    assert [proofs.was_right_at_use(trial_key) for trial_key in trial_keys] == [True, True, True]
    assert not proofs.at_use(managed, recipe, trial_keys[1], cast(Any, None), None)
    assert [proofs.was_right_at_use(trial_key) for trial_key in trial_keys] == [True, False, False]


def test_integrity_mode_finds_a_write_that_is_not_always_there() -> None:
    model, x = WritesBehindAutograd(), images()
    with VirtualMachine("titan-x", fake=False) as machine:
        model.writes = False
        with vdnn.offload("vdnn-all", device=machine, measure=True, min_bytes=0) as recorded:
            for _ in range(3):
                model(x).sum().backward()
        assert recorded.recording is not None
        plan = recompute_all(recorded.recording, offload_rest=False)
        with vdnn.offload(plan=plan, device=machine, min_bytes=0, integrity=True) as session:
            model(x).sum().backward()
            session.step()
            model.writes = True
            model(x).sum().backward()
            with pytest.raises(IntegrityError, match="BatchNorm|ReLU|float32"):
                session.step()


def test_a_recipe_that_is_wrong_is_dropped_once_and_said_once(
    open_session: OpenSession, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A recipe is tried before it is used. This one is a ReLU that passes negative values."""
    name = "ReluBackward0"
    wrong = dataclasses.replace(table._TABLE[name], run=lambda call, x: x.clone())
    monkeypatch.setitem(table._TABLE, name, wrong)
    session = open_session("recompute-all")
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
    plan = recompute_all(recording, offload_rest=False)
    monkeypatch.delitem(table._TABLE, "ReluBackward0")
    monkeypatch.setattr(compiled_search, "_compiled", {})  # of the recorded step
    session = trained_virtually("chain", plan)
    assert "cannot be recomputed here" in session.report()
    assert session.counters.storages, "the online policy moved it"


def test_a_recipe_returns_the_dtype_shape_and_strides_of_what_was_saved_or_says_that_it_is_wrong() -> None:
    wanted = torch.float32, torch.Size((2, 3)), (1, 2)
    made = torch.arange(12.0)[6:].view(2, 3)
    returned = _with_geometry(made, wanted)
    assert torch.equal(returned, made)
    assert (returned.stride(), returned.storage_offset(), returned.untyped_storage().nbytes()) == ((1, 2), 0, 24)
    for wrong in (made.double(), made.view(3, 2)):
        with pytest.raises(VdnnError, match=r"a recipe made .*, expected torch.float32 \(2, 3\)"):
            _with_geometry(wrong, wanted)


def test_bad_input_is_refused() -> None:
    with pytest.raises(TypeError, match="recompute: expected True or False, got 'yes'"):
        vdnn.offload(recompute="yes")  # type: ignore[arg-type]
