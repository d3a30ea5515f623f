"""Settled steps that recompute nothing run without torch's global module hooks, and follow the calls again when a step
differs."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo import convert_frame
from torch.nn.modules import module as module_hooks

import vdnn
from tests.runtime.rigs.settled_steps import settling_of
from vdnn import VirtualMachine
from vdnn.planning.footprint import offload_everything
from vdnn.planning.recomputing import planned_recompute
from vdnn.runtime.recompute.backend_flags import flags_of, observe_flags
from vdnn.runtime.session.session import Session
from vdnn.runtime.torch_internals.module_watch import ModuleWatch, calls_in_frames
from vdnn.step.plan import Action, PlannedLifetime, make_plan

SETTLES = 8  # steps


@pytest.fixture(autouse=True)
def nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests of this process may have compiled, and then no calls rest."""
    monkeypatch.setattr(convert_frame, "FRAME_COUNTER", 0)


def has_hooks() -> bool:
    return bool(module_hooks._global_forward_pre_hooks or module_hooks._global_forward_hooks)


def watch_of(session: Session) -> ModuleWatch:
    return session._engine.modules


class Block(nn.Module):
    """Tells what it sees when it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(16), nn.Linear(16, 16)
        self.sees: Callable[[], object] = lambda: None
        self.mix: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = torch.add

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.linear(self.norm(x)))
        self.sees()
        return self.mix(x, y * y)


class Model(nn.Module):
    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(16, 16)
        self.blocks = nn.Sequential(*[Block() for _ in range(blocks)])
        self.plain = gradients(self)  # outside of any session

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.blocks(torch.relu(self.first(x)))).sum()


def gradients(model: Model, rows: int = 8) -> list[torch.Tensor]:
    model.zero_grad()
    model(torch.rand(rows, 16, generator=torch.Generator().manual_seed(rows))).backward()
    return [one.grad.clone() for one in model.parameters() if one.grad is not None]


def check(model: Model) -> None:
    """The gradients of one step are those without a session."""
    assert all(map(torch.equal, gradients(model), model.plain))


@contextmanager
def settled(model: Model, *, recompute: bool = False) -> Iterator[Session]:
    """A session that offloads all, and whose steps are settled."""
    with VirtualMachine("titan-x", fake=False) as machine:
        options: dict[str, Any] = {"device": machine, "min_bytes": 0, "recompute": recompute}
        with vdnn.offload("keep", measure=True, **options) as recorded:
            for _ in range(2):
                gradients(model)
                recorded.step()
        assert recorded.recording is not None
        plan = make_plan(recorded.recording, "all", offload_everything(recorded.recording))
        with vdnn.offload(plan=plan, **options) as session:
            for _ in range(SETTLES):
                gradients(model)
                session.step()
            assert settling_of(session).is_expected
            yield session


def test_a_settled_step_calls_no_global_module_hook() -> None:
    model = Model()
    seen: list[bool] = []
    with settled(model) as session:
        before = session.counters.saves
        for block in model.blocks:
            block.sees = lambda: seen.append(has_hooks())
        gradients(model)
        session.step()
        saves = session.counters.saves - before
        assert watch_of(session).rests
        gradients(model)
        session.step()
        assert session.counters.saves - before == 2 * saves
    assert seen == [False] * 6


def test_a_session_that_is_entered_in_each_step_rests_too() -> None:
    model = Model()
    with settled(model) as session:
        pass
    for _ in range(3):
        with session:
            assert not has_hooks()
            gradients(model)
            session.step()
        assert not has_hooks()
    assert settling_of(session).is_expected


def test_a_copy_of_the_model_is_served_too() -> None:
    """Its saves are alike. Where nothing is recomputed it does not matter which module made them."""
    model = Model()
    with settled(model) as session:
        other = copy.deepcopy(model)
        expected = gradients(model)
        session.step()
        assert all(map(torch.equal, gradients(other), expected))
        session.step()
        assert settling_of(session).is_expected
        assert watch_of(session).rests


def test_a_step_that_begins_otherwise_sees_the_calls_that_run() -> None:
    """Its first modules have begun unseen."""
    for rests in (True, False):
        model = Model()
        with settled(model) as session:
            if not rests:
                watch_of(session).follow()
            assert has_hooks() is not rests
            stacks: list[list[str]] = []
            watch = watch_of(session)

            def see(watch: ModuleWatch = watch, stacks: list[list[str]] = stacks) -> None:
                stacks.append([type(one).__name__ for one in watch.stack()])

            for block in model.blocks:
                block.sees = see
            gradients(model, 12)
            session.step()
            assert stacks == [["Model", "Sequential", "Block"]] * 3
            assert has_hooks()


@pytest.mark.parametrize("has_begun", [False, True])
def test_keys_are_those_of_a_session_that_never_rested(has_begun: bool) -> None:
    """A new model of other sizes, whose first save is that of the settled step if `has_begun`."""
    model = Model()
    other = Model(blocks=5)
    rows = 8 if has_begun else 12
    found = []
    for rests in (True, False):
        with settled(model) as session:
            if not rests:
                watch_of(session).follow()
            steps = session._engine.steps
            keys = []
            for _ in range(3):
                gradients(other, rows)
                keys.append(list(steps._step.keys.saves))
                session.step()
            found.append(keys)
    assert found[0] == found[1]


def test_an_extra_save_in_the_middle_brings_the_hooks_back() -> None:
    model = Model()
    with settled(model) as session:
        states: list[tuple[bool, int]] = []

        def change() -> None:
            watch = watch_of(session)
            (torch.rand(4, requires_grad=True) * torch.rand(4)).sum()
            states.append((has_hooks(), len(watch.stack())))

        model.blocks[1].sees = change
        check(model)
        assert states[0] == (True, 3)
        model.blocks[1].sees = lambda: None
        check(model)
        session.step()
        for _ in range(2 * SETTLES):
            check(model)
            session.step()
        assert watch_of(session).rests


def test_steps_that_need_the_calls_every_other_time_end_the_rests() -> None:
    model = Model()
    with settled(model) as session:
        watch, rests = watch_of(session), []
        for number in range(64):
            gradients(model, 8 if number % 2 else 12)  # no plan has the second ones
            session.step()
            rests.append(watch.rests)
        assert any(rests)
        assert sum(rests) <= 6, "each rest makes the next one twice as far"


@contextmanager
def recomputing(model: Model, operation: str) -> Iterator[Session]:
    """A session whose plan recomputes what this operation makes, and nothing else."""
    with VirtualMachine("titan-x", fake=False) as machine:
        options: dict[str, Any] = {"device": machine, "min_bytes": 0}
        with vdnn.offload("keep", measure=True, **options) as recorded:
            for _ in range(2):
                gradients(model)
                recorded.step()
        recording = recorded.recording
        assert recording is not None
        lifetimes = tuple(
            planned_recompute(one)
            if one.recompute is not None and one.recompute.operation == operation
            else PlannedLifetime(one.nbytes, Action.KEEP)
            for one in recording.lifetimes
        )
        with vdnn.offload(plan=make_plan(recording, operation, lifetimes), **options) as session:
            yield session


@pytest.mark.parametrize(
    ("operation", "rests"),
    [
        ("tanh", True),  # torch's settings are read where the tanh saves
        ("tanh <- add <- mul", True),  # an addition saves nothing, and rounds once whatever they are
        ("tanh <- lerp <- mul", False),  # this one rounds twice: they are read at the calls next to it
        ("layer_norm", True),  # its eps is read from the frame of its call, at a save
        ("tanh <- addmm", True),  # the version of the bias is noted at the end of the step before
    ],
)
def test_a_plan_that_recomputes_rests_if_no_fact_is_noted_at_calls(operation: str, rests: bool) -> None:
    model = Model()
    if operation not in ("layer_norm", "tanh <- addmm"):
        for block in model.blocks:
            block.norm = block.linear = nn.Identity()
            if "lerp" in operation:
                block.mix = partial(torch.lerp, weight=0.5)
        model.plain = gradients(model)
    with recomputing(model, operation) as session:
        for _ in range(2 * SETTLES):
            check(model)
            session.step()
        assert settling_of(session).is_expected
        assert session.counters.recomputes >= SETTLES
        assert watch_of(session).rests is rests


@pytest.mark.parametrize("rests", [True, False], ids=["ahead of", "behind"])
def test_leaves_that_are_written_behind_the_end_of_a_step_keep_its_calls_followed(rests: bool) -> None:
    """Their versions at the end of a step say nothing of the next one."""
    model = Model()

    def write() -> None:
        with torch.no_grad():
            for block in model.blocks:
                block.linear.bias.add_(0)

    with recomputing(model, "tanh <- addmm") as session:
        for _ in range(2 * SETTLES):
            check(model)
            if rests:
                write()
            session.step()
            if not rests:
                write()
        assert settling_of(session).is_expected
        assert watch_of(session).rests is rests
        assert session.counters.recomputes == 2 * SETTLES * len(model.blocks), "in each step"


def test_an_exception_in_a_step_at_rest_leaves_nothing_behind() -> None:
    model = Model()
    with settled(model) as session:

        def fail() -> None:
            raise RuntimeError("stop here")

        model.blocks[2].sees = fail
        with pytest.raises(RuntimeError, match="stop here"):
            gradients(model)
        model.blocks[2].sees = lambda: None
        for _ in range(SETTLES):
            check(model)
            session.step()
            assert watch_of(session).stack() == []
    assert not has_hooks()


def knows_settings() -> bool:
    """True if the settings of an operation that saves nothing are known from the readings around it."""
    x = torch.rand(2, requires_grad=True)
    observe_flags()
    made = x + 1
    observe_flags()
    return flags_of(made.grad_fn) is not None


@pytest.mark.parametrize("ends_outside", [False, True])
def test_settings_are_known_at_saves_alone_while_calls_rest(ends_outside: bool) -> None:
    model = Model()
    assert knows_settings()
    with settled(model) as session:
        assert not knows_settings()
        session._engine.modules.running.rest(True)  # as if an interrupt had come in between, and it were told again
        if ends_outside:
            gradients(model)
    assert knows_settings()
    session.step()
    assert knows_settings()
    with session:
        assert not knows_settings()
        gradients(model, 12)
        assert knows_settings()
    assert knows_settings()


def test_a_step_within_the_call_of_a_module_does_not_rest() -> None:
    """The session was entered within it, so its stack does not begin with that module."""

    class Loop(nn.Module):
        def forward(self, model: Model) -> list[bool]:
            with settled(model) as session:
                return [watch_of(session).rests]

    assert Loop()(Model()) == [False]


def test_modules_that_are_marked_are_followed() -> None:
    model = Model()
    vdnn.keep(model.blocks[0])  # for good, and only this one
    with settled(model) as session:
        assert not watch_of(session).rests
    assert not has_hooks()


def test_a_compiled_program_keeps_its_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    with settled(model) as session:
        assert watch_of(session).rests
        monkeypatch.setattr(convert_frame, "FRAME_COUNTER", 1)
        for _ in range(3):
            gradients(model)
            session.step()
        assert not watch_of(session).rests
        assert has_hooks()
        assert settling_of(session).is_expected


def test_a_model_that_cannot_run_in_a_session_is_refused_in_a_step_at_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    model, other = Model(), Model(blocks=2)
    with settled(model) as session:

        def refuse(of: nn.Module) -> None:
            if of is other:
                raise vdnn.VdnnError("not this one")

        monkeypatch.setattr(session._engine, "look_into", refuse)
        with pytest.raises(vdnn.VdnnError, match="not this one"):
            gradients(other, 12)
        for _ in range(3):
            check(model)
            session.step()


def test_calls_are_followed_where_several_threads_call_modules() -> None:
    model = Model()
    with settled(model) as session:
        watch_of(session).follow()
        thread = threading.Thread(target=lambda: Model()(torch.rand(2, 16)))
        thread.start()
        thread.join()
        for _ in range(4):
            gradients(model)
            session.step()
        assert not watch_of(session).rests


def test_frames_tell_the_calls_that_run() -> None:
    found: list[list[str]] = []
    model = Model(blocks=1)
    model.blocks[0].sees = lambda: found.append([type(one).__name__ for one in calls_in_frames()])
    model(torch.rand(2, 16))
    handle = model.blocks[0].register_forward_hook(lambda *_: None)  # torch calls it in another way then
    model(torch.rand(2, 16))
    handle.remove()
    assert found == [["Model", "Sequential", "Block"]] * 2
    assert calls_in_frames() == []
