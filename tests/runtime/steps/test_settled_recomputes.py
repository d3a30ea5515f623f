"""Steps under plans that recompute or compress settle: Python runs where the plan acts, and nowhere else."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import vdnn
from tests.runtime.rigs.settled_steps import (
    PLANS_WITH_RECOMPUTES,
    RECOMPUTES,
    RECOMPUTES_AND_OFFLOADS,
    RECOMPUTES_SOME,
    Network,
    settled_session,
    settling_of,
)
from tests.runtime.rigs.virtual_training import recompute_all
from tests.runtime.steps.test_settled_steps import python_calls, run
from vdnn.runtime.machine.virtual_machine import VirtualMachine
from vdnn.runtime.session.session import Session
from vdnn.runtime.steps.executor import MoveKind
from vdnn.runtime.steps.step_script import NO_LIFETIME, EventKind, ScriptEvent
from vdnn.step.plan import Action

_HANDLED = (EventKind.PLANNED, EventKind.FETCH)


def events_of(session: Session) -> tuple[ScriptEvent, ...]:
    followed = settling_of(session).followed
    assert followed is not None
    return followed.script.events


@pytest.mark.parametrize("plan", PLANS_WITH_RECOMPUTES)
def test_a_settled_step_recomputes_what_the_plan_says(plan: str) -> None:
    with settled_session(plan) as (session, network):
        before, planned = session.counters.recomputes, session._engine.steps.plan
        network.step()
        assert planned is not None
        dropped = sum(one.is_recomputed for one in planned.lifetimes)
        session.step()
        assert session.counters.recomputes - before == dropped > 0
        assert settling_of(session).is_expected


@pytest.mark.parametrize("plan", PLANS_WITH_RECOMPUTES)
def test_only_the_points_of_the_plan_run_python(plan: str) -> None:
    with settled_session(plan) as (session, network):
        before = session.counters.uses
        with python_calls() as called:
            network.step()
        events = events_of(session)
        light = {event.lifetime for event in events if event.moving is not None}
        discarded = [event for event in events if event.moving is not None and event.moving.is_discarded]
        handled = [event for event in events[1:] if event.kind in _HANDLED and event.lifetime not in light]
        gated = [event for event in events[1:] if event.kind in (EventKind.EXEMPT, EventKind.KEPT, EventKind.USE)]
        assert called.count("_planned_save") + called.count("_planned_use") == len(handled)
        assert called.count("_recipe_for") == len(discarded) == called.count("recomputed")
        operands = sum(event.kind is EventKind.OPERAND for event in events)
        assert called.count("_planned_operand") <= operands, "the gate serves the others"
        acting = sum(bool(event.moves or event.encoded) for event in gated)
        # Those that only submit a copy whose operation is over, or look whether a mask can be packed by now.
        waiting = sum(event.is_new for event in handled)
        assert called.count("_moved") <= acting + waiting
        assert called.count("pack") == 1, "the first save of the step"
        assert bool(light - {event.lifetime for event in discarded}) is (plan == RECOMPUTES_AND_OFFLOADS)
        if plan != RECOMPUTES_AND_OFFLOADS:
            assert len(gated) > len(handled) / 2
        session.step()  # which adds what the gate has counted
        assert session.counters.uses - before == sum(not event.is_save for event in events)


@pytest.mark.parametrize("plan", [RECOMPUTES, RECOMPUTES_AND_OFFLOADS], ids=["kept", "moved"])
def test_a_recompute_reads_what_the_gate_serves(plan: str) -> None:
    """Python notes such a save for recipes, and handles none of them."""
    with settled_session(plan) as (session, network):
        found = network.step()
        events = events_of(session)
        read = {event.lifetime for event in events if event.kind is EventKind.OPERAND}
        discarded = {event.lifetime for event in events if event.moving is not None and event.moving.is_discarded}
        served = [event for event in events if event.is_read and event.is_new and event.lifetime in read - discarded]
        assert served
        assert all((event.moving is not None) is (plan == RECOMPUTES_AND_OFFLOADS) for event in served)
        assert not any(event.is_for_python for event in served)
        session.step()
        assert settling_of(session).is_expected
    assert_same(found, type(network)())


def test_python_is_called_for_moves_of_bytes_that_the_program_did_not_save() -> None:
    """Encoded bytes have no save in the script, and the gate has to call Python where they move."""
    event = ScriptEvent(EventKind.KEPT, 0, 0, ((0, MoveKind.RELEASE), (7, MoveKind.RELOAD)))
    fields = event.for_gate({0: 0})
    assert ((0, False), (NO_LIFETIME, True)) in fields


# Small programs whose plans drop all that can be recomputed.


@contextmanager
def settled_program(step: Callable[[], object]) -> Iterator[Session]:
    """A session whose steps, which are all alike, are settled."""
    with VirtualMachine("titan-x", fake=False) as machine:
        with vdnn.offload("keep", device=machine, min_bytes=0, measure=True) as session:
            for _ in range(2):
                step()
                session.step()
        assert session.recording is not None
        plan = recompute_all(session.recording, offload_rest=False)
        assert any(one.action is Action.RECOMPUTE for one in plan.lifetimes)
        with vdnn.offload(device=machine, plan=plan, min_bytes=0) as session:
            for _ in range(6):
                step()
                session.step()
            assert settling_of(session).is_expected
            yield session


class Overwrites(torch.autograd.Function):
    """Overwrites what it saved, as a backward in place may."""

    overwrites = False

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.sum()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        made = gradients[0] * x.clone()
        if Overwrites.overwrites:
            x.zero_()
        return made


def test_what_reads_an_overwritten_save_is_recomputed_before(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.rand(8, 8, requires_grad=True)

    def step() -> torch.Tensor:
        weight.grad = None
        read = weight * 2
        unused = read.sin()  # a save from which the next one can be recomputed
        (read.relu().sin().sum() + Overwrites.apply(read)).backward()
        assert weight.grad is not None
        del unused
        return weight.grad

    expected = step()
    with settled_program(step) as session:
        monkeypatch.setattr(Overwrites, "overwrites", True)
        before = session.counters.recomputes
        assert torch.equal(step(), expected)
        assert session.counters.recomputes > before


def test_a_save_that_the_gate_serves_and_a_changed_step_overwrites_is_read_before() -> None:
    """The recipe found a save of the gate. The step differs, and Python has the save when it is overwritten."""
    weight = torch.rand(8, 8, requires_grad=True)

    def step(*, is_changed: bool = False) -> torch.Tensor:
        weight.grad = None
        y, read, unused = weight.sin(), [], []
        for _ in range(6):
            read.append(y * 2)
            unused.append(read[-1].cos())  # a save from which the next one can be recomputed
            y = y @ torch.ones(8, 8) / 8 + read[-1].tanh()
        loss = y.sum()
        if is_changed:
            loss = loss + Overwrites.apply(read[2])
        loss.backward()
        assert weight.grad is not None
        return weight.grad

    Overwrites.overwrites = True
    try:
        expected, changed = step(), step(is_changed=True)
        with settled_program(step) as session:
            assert torch.equal(step(), expected)
            events = events_of(session)
            read = {event.lifetime for event in events if event.kind is EventKind.OPERAND}
            served = [event for event in events if event.is_read and event.is_new and event.lifetime in read]
            assert served
            session.step()
            assert torch.equal(step(is_changed=True), changed)
            session.step()
            assert torch.equal(step(), expected)
    finally:
        Overwrites.overwrites = False


def test_a_write_to_a_save_that_the_gate_serves_and_a_recompute_reads_raises() -> None:
    weight = torch.rand(8, 8, requires_grad=True)

    def step(*, writes: bool = False) -> None:
        y, read, unused = weight.sin(), [], []
        for _ in range(6):
            read.append(y * 2)
            unused.append(read[-1].cos())
            y = y @ torch.ones(8, 8) / 8 + read[-1].tanh()
        if writes:
            with torch.no_grad():
                read[2].mul_(2)
        y.sum().backward()

    with settled_program(step) as session:
        with pytest.raises(RuntimeError, match="modified"):
            step(writes=True)
        session.step()


def test_a_step_whose_module_is_made_anew_settles() -> None:
    """BERT and T5 of transformers make their loss in each step."""
    weight = torch.rand(8, 8, requires_grad=True)
    held: list[torch.nn.Module] = []

    def step(*, keeps: bool) -> None:
        made = torch.nn.CrossEntropyLoss()
        if keeps:
            held.append(made)  # so that no later one has its address
        made(weight.sin().exp(), torch.arange(8)).backward()

    for keeps in (False, True):
        with settled_program(lambda: step(keeps=keeps)) as session:  # noqa: B023  # called in the loop only
            step(keeps=keeps)
            session.step()
            assert settling_of(session).is_expected


@pytest.mark.parametrize("plan", [RECOMPUTES, RECOMPUTES_AND_OFFLOADS])
def test_a_recipe_is_tried_at_another_size_with_operands_that_the_gate_serves(plan: str) -> None:
    """The steps of both sizes are learned in turn, so the first of each that the gate serves may try a recipe."""
    with settled_session(plan) as (session, network):
        whole = network.x
        for number in range(16):
            network.x = whole[: 48 if number % 2 else 64]
            with warnings.catch_warnings():
                warnings.filterwarnings("error", message=".*It is not recomputed")
                found = network.step()
            session.step()
        assert settling_of(session).is_expected
        plain = type(network)()
        plain.x = plain.x[:48]
        assert_same(found, plain)


def assert_same(found: list[torch.Tensor | None], plain: Network) -> None:
    for one, other in zip(found, plain.step(), strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one, other)


def test_memory_that_the_program_takes_between_settled_steps_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A settled step reads no statistics at its first save; those between two steps tell what is allocated there."""
    with settled_session(RECOMPUTES_SOME) as (session, network):
        plans, allocated = session._engine.steps._plans, []
        choose = plans.choose
        monkeypatch.setattr(plans, "choose", lambda keys, now, *_: (allocated.append(now), choose(keys, now))[1])
        run(session, network, 2)
        held = torch.zeros(1024)
        run(session, network, 2)
        assert allocated[1] - allocated[0] == 0
        assert allocated[3] - allocated[1] == held.nbytes
