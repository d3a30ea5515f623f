"""A settled step runs through the native gate: counted, and with the counts of a step that does not."""

from __future__ import annotations

import copy
import gc
import itertools
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import vdnn
from benchmarks.core.settled_chain import chain_plan
from tests.runtime.rigs.settled_steps import (
    KEEPS_ALL,
    LAYERS,
    OFFLOADS_ALL,
    OFFLOADS_SOME,
    PLANS,
    PLANS_WITH_RECOMPUTES,
    RECOMPUTES_SOME,
    Network,
    settled_session,
    settling_of,
)
from vdnn._C import SimDevice
from vdnn.planning.footprint import offload_everything
from vdnn.runtime.session.session import Session
from vdnn.runtime.steps import settling
from vdnn.runtime.storage.counters import Kept
from vdnn.runtime.storage.kept import unpack_without_hooks
from vdnn.runtime.storage.managed_storage import ManagedStorage
from vdnn.step.plan import Action, PlannedLifetime, make_plan

STEPS = 5
CALLED_BY_THE_GATE = ("_save", "_use", "_moved", "_hand_over", "_move", "_make_source")

PACKAGE = str(Path(vdnn.__file__).parent)


@contextmanager
def python_calls() -> Iterator[list[str]]:
    """The names of vdnn's Python functions that are called."""
    found: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            found.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(None)


class CountingLock:
    """Counts how often it is taken."""

    def __init__(self) -> None:
        self.taken = 0
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self.taken += 1
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


@contextmanager
def settled_chain(saves: int, *, offloads: bool) -> Iterator[tuple[Session, torch.Tensor]]:
    """A chain of so many operations and one more, on no virtual machine, whose own Python runs at each operation."""
    x = torch.rand(64, requires_grad=True)
    plan = chain_plan(saves, 64, offloads=offloads)
    device: Any = SimDevice()
    with vdnn.offload(device=device, plan=plan, min_bytes=0) as session:
        for _ in range(4):
            chain(x, saves + 1).sum().backward()
            session.step()
        assert settling_of(session).is_expected
        yield session, x


def chain(x: torch.Tensor, operations: int) -> torch.Tensor:
    for _ in range(operations):
        x = x.sin()
    return x


def test_points_without_an_action_run_no_python() -> None:
    with settled_chain(40, offloads=False) as (session, x):
        y = chain(x, 2)
        with python_calls() as called:
            chain(y, 39).sum().backward()
        assert called == []
        session.step()
        assert settling_of(session).is_expected


def test_what_the_plan_offloads_runs_no_python() -> None:
    with settled_chain(100, offloads=True) as (session, x):
        begun = [chain(x, 2)]
        before = session.counters.reloads
        with python_calls() as called:
            chain(begun.pop(), 99).sum().backward()
        assert not set(CALLED_BY_THE_GATE).intersection(called)
        session.step()
        assert settling_of(session).is_expected
        assert session.counters.reloads - before >= 30


def test_only_what_the_gate_does_not_serve_runs_python() -> None:
    with settled_session(OFFLOADS_SOME) as (session, network):
        followed = settling_of(session)
        with python_calls() as called:
            network.step()
        assert followed.followed is not None
        events = followed.followed.script.events
        light = {event.lifetime for event in events if event.moving is not None}
        planned = {event.planned for event in events if event.lifetime in light}
        acting = sum(
            (event.kind in (2, 4) and event.lifetime not in light) or any(one not in planned for one, _ in event.moves)
            for event in events
        )
        assert light
        assert acting < sum(event.kind in (2, 4) or bool(event.moves) for event in events)
        calls = sum(name in CALLED_BY_THE_GATE for name in called)
        assert calls <= acting + 2 * LAYERS  # those that only submit a copy whose operation is over
        assert called.count("_save") + called.count("_use") <= acting + 1  # the first save of the step


def test_the_gate_takes_no_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    with settled_session(KEEPS_ALL) as (session, network):
        y = torch.tanh(network.x @ network.weights[0])
        lock = CountingLock()
        monkeypatch.setattr(session._engine.saves, "lock", lock)
        for weight in network.weights[1:]:
            y = torch.tanh(y @ weight)
        y.square().mean().backward()
        assert lock.taken == 0
        monkeypatch.undo()


@pytest.mark.parametrize("plan", [KEEPS_ALL, OFFLOADS_SOME, RECOMPUTES_SOME])
def test_the_hooks_of_a_settled_step_read_no_statistics(plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with settled_session(plan) as (session, network):
        gauges = session._engine.steps.gauges
        assert gauges is not None
        read: list[str] = []
        for name in ("take_peaks", "allocated_bytes", "mark"):
            method = getattr(gauges, name)
            monkeypatch.setattr(gauges, name, lambda *arguments, n=name, m=method: (read.append(n), m(*arguments))[1])
        network.step()
        assert read == []
        session.step()
        assert settling_of(session).is_expected
        assert read.count("take_peaks") == 2  # between two steps, not in hooks
        monkeypatch.undo()


def blocks_of_a_forward(x: torch.Tensor, operations: int) -> int:
    gc.collect()
    gc.disable()
    try:
        before = sys.getallocatedblocks()
        y = chain(x, operations)
        blocks = sys.getallocatedblocks() - before
        del y
        return blocks
    finally:
        gc.enable()


def test_a_kept_save_allocates_no_more_than_the_tensor_that_it_holds() -> None:
    """A non-leaf is held as its detach(), as in kept.py: a save that held an output itself would leak its graph."""
    x = torch.rand(64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, lambda tensor: tensor):
        blocks_of_a_forward(x, 10)
        detached = blocks_of_a_forward(x, 201) - blocks_of_a_forward(x, 101)
    with settled_chain(200, offloads=False) as (session, x):
        found: dict[int, list[int]] = {201: [], 101: []}
        for operations in 3 * (201, 101):  # other code may allocate meanwhile
            chain(x, 201).sum().backward()
            session.step()
            found[operations].append(blocks_of_a_forward(x, operations))
            assert settling_of(session).gate.is_open  # type: ignore[union-attr]
            session.step()
            for _ in range(3):
                chain(x, 201).sum().backward()
                session.step()
    assert min(found[201]) - min(found[101]) <= detached


@pytest.mark.parametrize("plan", [*PLANS, *PLANS_WITH_RECOMPUTES])
def test_a_settled_session_reports_what_another_one_does(plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reports = []
    for most_lessons in (8, 0):
        monkeypatch.setattr(settling, "_MOST_LESSONS", most_lessons)
        if most_lessons:
            with settled_session(plan) as (session, network):
                steps = session.num_steps
                run(session, network, STEPS)
        else:
            monkeypatch.setattr("tests.runtime.rigs.settled_steps.settle", lambda session, network: None)
            with settled_session(plan) as (session, network):
                run(session, network, steps + STEPS)
                assert not settling_of(session).is_expected
        reports.append(session.report())
    assert reports[0] == reports[1]


def run(session: Session, network: Network, steps: int) -> None:
    for _ in range(steps):
        network.step()
        session.step()


def test_a_write_to_a_save_that_the_gate_keeps_is_refused() -> None:
    with settled_session(KEEPS_ALL) as (_, network):
        y = torch.tanh(network.x @ network.weights[0])
        z = torch.tanh(y @ network.weights[1])
        with torch.no_grad():
            y.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            z.sum().backward()


def gradient_after_a_swap(network: Network) -> torch.Tensor:
    y = network.x
    for weight in network.weights:
        y = torch.tanh(y @ weight)
    network.weights[-1].data = network.weights[-1].detach() * 2
    (gradient,) = torch.autograd.grad(y.sum(), [network.weights[-2]])
    return gradient


def test_a_parameter_that_the_gate_holds_shows_the_data_that_was_swapped_in() -> None:
    """FSDP swaps the data of parameters between save and use."""
    expected = gradient_after_a_swap(Network())
    with settled_session(KEEPS_ALL) as (session, network):
        found = gradient_after_a_swap(network)
        assert session.counters.kept[Kept.PLAN]
        assert torch.equal(found, expected)


def test_a_save_that_the_gate_kept_can_be_used_after_the_session() -> None:
    expected = Network().step()
    with settled_session(KEEPS_ALL) as (session, network):
        for weight in network.weights:
            weight.grad = None
        y = network.x
        for weight in network.weights:
            y = torch.tanh(y @ weight)
        assert settling_of(session).gate.is_open  # type: ignore[union-attr]
    y.square().mean().backward()
    for found, gradient in zip([weight.grad for weight in network.weights], expected, strict=True):
        assert found is not None
        assert gradient is not None
        assert torch.equal(found, gradient)


def test_other_code_unpacks_what_the_gate_kept() -> None:
    with settled_session(KEEPS_ALL) as (_, network):
        y = torch.tanh(network.x @ network.weights[0])
        z = torch.tanh(y @ network.weights[1])
        packed = z.grad_fn._raw_saved_result.data  # type: ignore[union-attr]
        assert type(packed) is vdnn._C.KeptSave
        assert torch.equal(unpack_without_hooks(packed), z)


@pytest.mark.parametrize("offloads", [False, True])
def test_no_storage_of_a_settled_step_is_managed_by_python(offloads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    with settled_chain(40, offloads=offloads) as (session, x):
        monkeypatch.setattr(ManagedStorage, "__init__", lambda *_, **__: made.append(1))
        chain(x, 41).sum().backward()
        session.step()
        assert settling_of(session).is_expected
    assert made == []


@pytest.mark.parametrize("offloads", [False, True])
def test_a_first_save_that_only_the_gate_can_tell_apart_is_followed_by_python(offloads: bool) -> None:
    """Its key is that of the settled step: a module of the same name in a copy of the model saves it. The calls of
    modules are followed, because one is marked."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh()) for _ in range(4)])
    x = torch.rand(8, 16)

    def gradients(of: torch.nn.Module) -> list[torch.Tensor]:
        of.zero_grad()
        of(x).sum().backward()
        return [one.grad.clone() for one in of.parameters() if one.grad is not None]

    marked = torch.nn.Linear(1, 1)
    vdnn.keep(marked)
    other = copy.deepcopy(model)
    expected = gradients(other)
    with vdnn.VirtualMachine("titan-x", fake=False) as machine:
        options: Any = {"device": machine, "min_bytes": 0, "recompute": False, "measure": True}
        with vdnn.offload("keep", **options) as recorded:
            for _ in range(2):
                gradients(model)
                recorded.step()
        assert recorded.recording is not None
        lifetimes = offload_everything(recorded.recording)
        if not offloads:
            lifetimes = tuple(PlannedLifetime(one.nbytes, Action.KEEP) for one in lifetimes)
        plan = make_plan(recorded.recording, "all alike", lifetimes)
        with vdnn.offload(device=machine, min_bytes=0, plan=plan) as session:
            counted = []
            for one in (model,) * 6 + (other,) * 6:
                assert all(map(torch.equal, gradients(one), expected))
                session.step()
                counted.append((session.counters.saves, settling_of(session).is_expected))
    assert [is_settled for _, is_settled in counted][5:8] == [True, False, False]
    assert counted[-1][1]
    assert len({after - before for (before, _), (after, _) in itertools.pairwise(counted)}) == 1


def test_a_first_save_of_bytes_of_an_earlier_step_is_followed_by_python() -> None:
    with settled_session(OFFLOADS_ALL) as (session, network):
        kept = torch.tanh(network.x @ network.weights[0])  # the step that this begins is cut off by the next one
        session.step()
        for _ in range(3):
            for found, expected in zip(network.step(), Network().step(), strict=True):
                assert found is not None
                assert expected is not None
                assert torch.equal(found, expected)
            session.step()
        kept.sum().backward()
        session.step()
        run(session, network, 4)
        assert settling_of(session).is_expected


def test_steps_settle_again_after_one_that_differs() -> None:
    with settled_session(OFFLOADS_ALL) as (session, network):
        network.step()
        torch.tanh(network.x @ network.weights[0])  # no more saves, and no use
        session.step()
        assert not settling_of(session).is_expected
        run(session, network, 4)
        assert settling_of(session).is_expected


def test_only_checked_steps_are_measured() -> None:
    with settled_session(OFFLOADS_SOME) as (session, network):
        timeline = session.timeline
        run(session, network, 2)
        assert timeline is not None
        assert session.timeline is timeline


def test_a_session_that_measures_measures_every_step() -> None:
    with vdnn.VirtualMachine("titan-x", fake=False) as machine:
        network = Network()
        with vdnn.offload(device=machine, budget="1GiB", recompute=False, min_bytes=0, measure=True) as session:
            run(session, network, 6)
            timeline = session.timeline
            run(session, network, 1)
            assert session.timeline is not timeline
            assert not settling_of(session).is_expected
