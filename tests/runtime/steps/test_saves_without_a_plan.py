"""Saves that the native gate keeps in steps without a plan: all that is recorded, measured, counted and moved is as if
Python had managed them."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import nn

import vdnn
from tests.fuzz.outcomes import outcome_of, warnings_of_vdnn
from tests.fuzz.plot import program_of
from tests.fuzz.program import Program, flattened
from tests.fuzz.world import World
from tests.runtime.rigs.virtual_training import MODELS, loss_of
from vdnn._C import KeptSave
from vdnn.runtime.machine.virtual_machine import VirtualMachine
from vdnn.runtime.recompute.proofs import disabled_recipes
from vdnn.runtime.session.session import Session
from vdnn.runtime.steps.settling import Settling
from vdnn.runtime.steps.steps import StepWatch
from vdnn.runtime.storage.managed_storage import ManagedStorage
from vdnn.step.recording import Recording

_STEPS = 3


class Seen(NamedTuple):
    """One step, as far as anybody can see it."""

    outcome: Any
    recording: Recording | None
    timeline: Any
    counters: str
    live_bytes: int


def watch_of(session: Session) -> StepWatch:
    steps = session._engine.steps
    assert isinstance(steps, StepWatch)
    return steps


def steps_of(
    make: Callable[[], Callable[[int, Callable[[], Session]], Any]],
    *,
    natively: bool,
    budget: int | None = None,
    recompute: bool = False,
) -> list[Seen]:
    """Takes recorded steps without a plan: with a budget under its guard, else with everything kept."""
    disabled_recipes.clear()
    seen = []
    with (
        VirtualMachine("titan-x", fake=False) as machine,
        vdnn.offload(
            "keep" if budget is None else "auto",
            device=machine,
            budget=budget,
            measure=True,
            recompute=recompute,
            min_bytes=0,
            warmup_steps=0,
        ) as session,
    ):
        watch = watch_of(session)
        patches = [] if natively else [mock.patch.object(Settling, "keep_unplanned")]
        if budget is not None:
            patches.append(mock.patch.object(watch._plans, "choose", return_value=None))
        for patch in patches:
            patch.start()
        step = make()
        try:
            for index in range(_STEPS):
                watch._measured.last_recorded = None
                outcome = step(index, lambda: session)
                session.step()
                recording, timeline = watch._measured.recording, session.timeline
                live_bytes = machine.tracker.live_bytes
                # A trial uses managed saves through the hooks, and is no use of the program.
                counters = replace(session.counters, uses=0, used_in_place=0) if recompute else session.counters
                seen.append(Seen(outcome, recording, timeline, repr(counters), live_bytes))
        finally:
            for patch in patches:
                patch.stop()
    return seen


def training(name: str) -> Callable[[], Callable[[int, Callable[[], Session]], Any]]:
    def make() -> Callable[[int, Callable[[], Session]], Any]:
        torch.manual_seed(0)
        model, inputs = MODELS[name]()

        def step(index: int, enter: Callable[[], Session]) -> Any:
            loss_of(model(*inputs)).backward()
            gradients = [parameter.grad for parameter in model.parameters()]
            model.zero_grad()
            return [None if one is None else one.tolist() for one in gradients]

        return step

    return make


def drawn(program: Program) -> Callable[[], Callable[[int, Callable[[], Session]], Any]]:
    def make() -> Callable[[int, Callable[[], Session]], Any]:
        world = World(program)

        def step(index: int, enter: Callable[[], Session]) -> Any:
            outcome = outcome_of(world, index, enter)
            return repr(outcome.error), outcome.trace, outcome.state

        return step

    return make


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_recordings_of_kept_steps_are_those_of_managed_saves(name: str, *, recompute: bool) -> None:
    native = steps_of(training(name), natively=True, recompute=recompute)
    assert native == steps_of(training(name), natively=False, recompute=recompute)
    recording = native[-1].recording
    assert recording is not None
    assert recording.lifetimes


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("share", [0.4, 0.7, 0.9, 1.5])
@pytest.mark.parametrize("name", MODELS)
def test_guarded_steps_move_what_they_would_of_managed_saves(name: str, share: float, *, recompute: bool) -> None:
    recording = steps_of(training(name), natively=False)[0].recording
    assert recording is not None
    budget = int(share * recording.peak_bytes)
    native = steps_of(training(name), natively=True, budget=budget, recompute=recompute)
    assert native == steps_of(training(name), natively=False, budget=budget, recompute=recompute)


def of_a_wide_head() -> Callable[[int, Callable[[], Session]], Any]:
    """A step whose last product is far larger than all that it saves, and saves its weight ahead of its operand."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4)]
    model = nn.Sequential(*layers, nn.LayerNorm(32), nn.Linear(32, 512, bias=False))

    def step(index: int, enter: Callable[[], Session]) -> Any:
        model(torch.ones(128, 32)).sum().backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        model.zero_grad()
        return [None if one is None else one.tolist() for one in gradients]

    return step


@pytest.mark.parametrize("share", [0.5, 0.7, 0.9])
def test_a_product_without_room_is_guarded_alike(share: float) -> None:
    """Its guard evicts all that the step keeps, in the middle of the save of its operand."""
    recording = steps_of(of_a_wide_head, natively=False)[0].recording
    assert recording is not None
    budget = int(share * recording.peak_bytes)
    native = steps_of(of_a_wide_head, natively=True, budget=budget)
    assert native == steps_of(of_a_wide_head, natively=False, budget=budget)


def _may_differ(program: Program, *, is_guarded: bool) -> bool:
    """True for programs with one of these:

    * A custom backward that writes to what it unpacks. Its memory is a gradient from then on, which a managed save is
      not recorded to hold.
    * Under a guard, a write to a value that is saved. A managed save is counted as evicted though its copy is refused.
    * A nested tensor: the first one of a process takes longer than later ones.
    """
    statements = list(flattened(program.body))
    overwrites = any(one.name.startswith("custom") and True in one.args for one in statements)
    return overwrites or any(one.name == "nested" or (is_guarded and one.name == "write_value") for one in statements)


def differences(seeds: range, share: float | None, *, recompute: bool) -> list[str]:
    """Steps from a program's first error on do not count: a use that raises is a point of managed saves only."""
    found = []
    with warnings_of_vdnn():
        for seed in seeds:
            program = program_of(seed, "auto 50")
            if _may_differ(program, is_guarded=share is not None):
                continue
            gc.disable()
            try:
                budget, python = None, steps_of(drawn(program), natively=False, recompute=recompute)
                if share is not None:
                    peaks = [one.recording.peak_bytes for one in python if one.recording is not None]
                    if not peaks:
                        continue
                    budget = int(share * max(peaks))
                    python = steps_of(drawn(program), natively=False, budget=budget, recompute=recompute)
                native = steps_of(drawn(program), natively=True, budget=budget, recompute=recompute)
            except vdnn.VdnnError:  # the budget cannot be met
                continue
            finally:
                gc.enable()
            whole = next((index for index, one in enumerate(python) if one.outcome[0] != "None"), _STEPS)
            if native[:whole] != python[:whole]:
                found.append(program.listing())
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("share", [None, 0.6, 0.9])
def test_random_programs_are_recorded_and_guarded_alike(share: float | None, *, recompute: bool) -> None:
    found = differences(range(40), share, recompute=recompute)
    assert not found, "\n\n".join(found)


@pytest.mark.drawn(of=6)
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("share", [None, 0.6, 0.9])
@pytest.mark.parametrize("first", range(40, 1000, 80))
def test_a_thousand_random_programs_are_recorded_and_guarded_alike(
    first: int, share: float | None, *, recompute: bool
) -> None:
    found = differences(range(first, first + 80), share, recompute=recompute)
    assert not found, "\n\n".join(found)


# What becomes of single saves.


def gradient_of(tensor: torch.Tensor) -> torch.Tensor:
    assert tensor.grad is not None
    return tensor.grad


@pytest.fixture
def managed(monkeypatch: pytest.MonkeyPatch) -> list[ManagedStorage]:
    """The storages that Python manages from now on."""
    made: list[ManagedStorage] = []
    original = ManagedStorage.__init__

    def noted(self: ManagedStorage, *arguments: Any) -> None:
        original(self, *arguments)
        made.append(self)

    monkeypatch.setattr(ManagedStorage, "__init__", noted)
    return made


@pytest.fixture
def machine() -> Any:
    with VirtualMachine("titan-x", fake=False) as entered:
        yield entered


def recorded(machine: VirtualMachine, **options: Any) -> Session:
    session: Session = vdnn.offload(
        "keep", device=machine, recompute=False, measure=True, min_bytes=0, warmup_steps=0, **options
    )
    return session


def test_python_manages_the_first_save_of_a_step_alone(machine: VirtualMachine, managed: list[ManagedStorage]) -> None:
    x = torch.randn(64, 64, requires_grad=True)
    with recorded(machine) as session:
        for step in range(3):
            y = x
            for _ in range(6):
                y = y.tanh()
            y.sum().backward()
            session.step()
            assert len(managed) == step + 1
    assert session.counters.saves == 18
    assert session.counters.uses == session.counters.used_in_place == 18


def test_later_recorded_steps_manage_no_more_for_recipes_that_are_known(
    machine: VirtualMachine, managed: list[ManagedStorage]
) -> None:
    x = torch.randn(64, 64, requires_grad=True)
    with vdnn.offload("keep", device=machine, measure=True, min_bytes=0, warmup_steps=0) as session:
        for _ in range(3):
            managed.clear()
            watch_of(session)._measured.last_recorded = None
            y = x.tanh()
            for _ in range(6):
                y = (y * 2).sigmoid().exp()
            y.sum().backward()
            session.step()
        assert len(managed) == 1
        recording = watch_of(session)._measured.recording
    assert recording is not None
    assert sum(one.recompute is not None for one in recording.lifetimes) >= 6


def test_a_write_between_save_and_use_raises_autograds_error(machine: VirtualMachine) -> None:
    x = torch.randn(8, requires_grad=True)
    with recorded(machine):
        y = x.tanh().exp()
        z = y * y
        y.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            z.sum().backward()


def test_a_part_of_a_kept_storage_is_saved_as_before(machine: VirtualMachine, managed: list[ManagedStorage]) -> None:
    x = torch.randn(8, 64, requires_grad=True)
    with recorded(machine) as session:
        y = x.tanh().exp()  # its storage is kept whole
        (y * 2 + y[:2].sin().sum()).sum().backward()
        session.step()
    recording = session.recording
    assert recording is not None
    plain = x.detach().clone().requires_grad_()
    y = plain.tanh().exp()
    (y * 2 + y[:2].sin().sum()).sum().backward()
    assert torch.equal(gradient_of(x), gradient_of(plain))
    assert len(managed) == 2  # the first save, and the storage of the part


def test_a_second_backward_uses_what_the_gate_keeps(machine: VirtualMachine) -> None:
    x = torch.randn(8, dtype=torch.float64, requires_grad=True)
    with recorded(machine) as session:
        (slope,) = torch.autograd.grad(x.sin().exp().sum(), x, create_graph=True)
        slope.square().sum().backward()
        session.step()
    plain = x.detach().clone().requires_grad_()
    (slope,) = torch.autograd.grad(plain.sin().exp().sum(), plain, create_graph=True)
    slope.square().sum().backward()
    assert torch.equal(gradient_of(x), gradient_of(plain))


def test_a_backward_on_another_thread_counts_its_uses(machine: VirtualMachine) -> None:
    x = torch.randn(64, requires_grad=True)
    with recorded(machine) as session:
        loss = x.tanh().exp().sin().sum()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        session.step()
    assert session.counters.uses == session.counters.saves == 3
    assert session.recording is not None
    assert all(one.uses for one in session.recording.lifetimes)


def test_graphs_outlive_the_step_and_the_session(machine: VirtualMachine) -> None:
    x = torch.randn(64, requires_grad=True)
    with recorded(machine) as session:
        loss = x.tanh().exp().sin().sum()
        session.step()
        x.cos().exp().sum().backward()
        session.step()
    del session
    gc.collect()
    x.grad = None
    loss.backward()
    plain = x.detach().clone().requires_grad_()
    plain.tanh().exp().sin().sum().backward()
    assert torch.equal(gradient_of(x), gradient_of(plain))


def exempt() -> Callable[[int, Callable[[], Session]], Any]:
    """Marked tensors, paused saves, small ones and views of parameters, among others."""
    torch.manual_seed(0)
    layer, x = nn.Linear(16, 16), torch.randn(4, 16)

    def step(index: int, enter: Callable[[], Session]) -> Any:
        marked = layer(x).tanh()
        vdnn.keep(marked)
        with vdnn.paused():
            paused = (marked * marked).exp()
        (layer(paused).tanh() * marked + layer.weight[:4].exp()).sum().backward()
        gradient = gradient_of(layer.weight).tolist()
        layer.zero_grad()
        return gradient

    return step


@pytest.mark.parametrize("recompute", [False, True])
def test_exempt_saves_stay_out_of_the_recording(*, recompute: bool) -> None:
    native = steps_of(exempt, natively=True, recompute=recompute)
    assert native == steps_of(exempt, natively=False, recompute=recompute)
    assert "marked" in native[0].counters


def test_a_kept_save_is_the_gates_own(machine: VirtualMachine) -> None:
    x = torch.randn(8, requires_grad=True)
    with recorded(machine) as session:
        settled = session._engine.packer._settled
        assert settled is not None
        y = x.tanh().exp()
        saved = settled.gate.pack(y)
        assert type(saved) is KeptSave
        assert settled.gate.unpack(saved).data_ptr() == y.data_ptr()
        del saved
