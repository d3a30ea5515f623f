"""The gate moves by itself what a settled plan offloads; whatever is not as planned falls back to Python."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.runtime.rigs.light_steps import (
    LAYERS,
    Model,
    NoisyModel,
    PartsModel,
    host_bytes,
    light_lifetimes,
    light_session,
    same,
)
from tests.runtime.rigs.settled_steps import OFFLOADS_ALL, OFFLOADS_SOME, Network, settled_session, settling_of
from tests.runtime.steps.test_settled_steps import CALLED_BY_THE_GATE, python_calls
from vdnn._C import LightSave
from vdnn.runtime.storage.kept import unpack_without_hooks
from vdnn.runtime.storage.packed_view import PackedView

pytestmark = pytest.mark.filterwarnings("ignore::vdnn.user_warnings.VdnnWarning")
OUT_OF_MEMORY = 2  # of the driver


@pytest.fixture
def expected() -> list[torch.Tensor]:
    return Model().step()


def saved_by(node: Any) -> list[Any]:
    """The packed forms that the nodes of a graph hold."""
    found, seen, nodes = [], set(), [node]
    while nodes:
        one = nodes.pop()
        if one is None or one in seen:
            continue
        seen.add(one)
        slots = [getattr(one, name) for name in dir(one) if name.startswith("_raw_saved_")]
        found += [slot.data for slot in slots if hasattr(slot, "data")]
        nodes += [parent for parent, _ in one.next_functions]
    return found


def test_a_settled_step_moves_its_storages_without_python(monkeypatch: pytest.MonkeyPatch, expected: Any) -> None:
    with light_session(monkeypatch) as (session, model, handed_over):
        before = session.counters.storages, session.counters.prefetched_reloads
        with python_calls() as called:
            gradients = model.step()
        light = light_lifetimes(session)
        session.step()
        assert settling_of(session).is_expected
        assert same(gradients, expected)
        assert len(light) >= 20
        assert handed_over.lifetimes == []
        assert session.counters.storages - before[0] >= len(light)
        # One is a leaf, which the model holds: its uses find it on the device.
        assert session.counters.prefetched_reloads - before[1] >= len(light) - 1
        hooks = [name for name in called if name in CALLED_BY_THE_GATE]
        assert len(hooks) <= 12, hooks


def test_parts_of_storages_and_permuted_tensors_move_without_python(monkeypatch: pytest.MonkeyPatch) -> None:
    with light_session(monkeypatch, make=PartsModel) as (session, model, handed_over):
        gradients = model.step()
        followed = settling_of(session).followed
        assert followed is not None
        first = [event for event in followed.script.events if event.moving is not None and event.is_new]
        session.step()
        assert settling_of(session).is_expected
        assert same(gradients, PartsModel().step())
        assert sum(event.nbytes < event.storage_bytes for event in first) >= LAYERS - 2, "parts"
        permuted = [one for one in first if one.moving is not None and not one.moving.is_dense]
        assert sum(event.nbytes == event.storage_bytes for event in permuted) >= LAYERS - 2, "permuted tensors"
        assert handed_over.lifetimes == []


@pytest.mark.parametrize("in_backward", [False, True], ids=["in the forward pass", "in the backward pass"])
def test_parts_of_storages_are_continued_by_python(monkeypatch: pytest.MonkeyPatch, in_backward: bool) -> None:
    """The step differs in the middle, with copies on the way out, or with reloads."""

    def step(model: Model) -> list[torch.Tensor]:
        loss = model.forward() if in_backward else model.forward(lambda y: y.sin().cos())
        return [one.detach() for one in torch.autograd.grad(loss, model.weights, create_graph=in_backward)]

    with light_session(monkeypatch, make=PartsModel) as (session, model, handed_over):
        gradients = step(model)
        session.step()
        assert same(gradients, step(PartsModel()))
        assert handed_over.lifetimes
        assert same(model.step(), PartsModel().step())
        session.step()


class Reader:
    """A discarded storage, as far as the index of readers knows it."""

    is_yet_to_be_recomputed = True

    def __init__(self, *given: object) -> None:
        self.discarded = SimpleNamespace(counted=SimpleNamespace(recipe=SimpleNamespace(given=given)))
        self.reference = weakref.ref(self)


@pytest.mark.parametrize("is_handed_over", [False, True], ids=["before", "after"])
def test_readers_of_a_light_save_are_found_when_python_has_it(
    monkeypatch: pytest.MonkeyPatch, is_handed_over: bool
) -> None:
    """Python takes a save over when a step differs, and also for a trial, before its reader is noted."""
    with light_session(monkeypatch) as (session, model, _):
        loss = model.forward()
        save = next(one for one in saved_by(loss.grad_fn) if type(one) is LightSave)
        readers, reader = session._engine.saves.readers, Reader(save)
        if is_handed_over:
            save.full()
        readers.add(reader)  # type: ignore[arg-type]
        assert readers.of(save.witness if save.view is None else save.view.managed) == [reader]
        assert readers.of(save.full().managed) == [reader]
        loss.backward()
        session.step()


def test_a_copy_of_a_save_without_a_graph_waits_for_its_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    with light_session(monkeypatch, make=NoisyModel) as (session, model, handed_over):
        with python_calls() as called:
            gradients = model.step()
        assert same(gradients, NoisyModel().step())
        followed = settling_of(session).followed
        assert followed is not None
        events = followed.script.events
        noise = {event.lifetime for event in events if event.is_leaf and event.moving is not None}
        assert len(noise) >= LAYERS - 2
        assert noise <= light_lifetimes(session)
        assert handed_over.lifetimes == []
        assert called.count("when_complete") <= 2, "no copy waits in Python"
        session.step()


def test_a_copy_that_waits_is_continued_by_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step differs at the next save, and the copy still waits."""

    def within(y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rrelu(y.sin(), 0.1, 0.9, training=True)

    with light_session(monkeypatch, make=NoisyModel) as (session, model, _):
        for _ in range(2):
            assert same(model.step(within), NoisyModel().step(within))
            session.step()
            assert same(model.step(), NoisyModel().step())
            session.step()


def test_views_and_shared_storages_have_one_copy(monkeypatch: pytest.MonkeyPatch, expected: Any) -> None:
    with light_session(monkeypatch) as (session, model, _):
        loss = model.forward()
        packed = [one for one in saved_by(loss.grad_fn) if type(one) is LightSave]
        assert len(packed) > len(light_lifetimes(session)) + 8
        loss.backward()
        assert same(model.gradients(), expected)
        shared, copies = session.counters.shared_saves, session.counters.storages
        session.step()
        assert session.counters.shared_saves - shared > 8
        assert 0 < session.counters.storages - copies <= len(packed) - 8


def test_the_counts_are_those_of_python(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = []
    for is_light in (True, False):
        with light_session(monkeypatch) as (session, model, _):
            if not is_light:
                monkeypatch.setattr("vdnn.runtime.session.light_storages._may_be_light", lambda transport: False)
            first = vars(session.counters).copy()
            for _ in range(3):
                model.step()
                session.step()
            last = vars(session.counters)
            names = [name for name in last if isinstance(last[name], int)]
            counted.append({name: last[name] - first[name] for name in names})
            assert host_bytes(session) == 0
    assert counted[0] == counted[1]


def test_two_backward_passes(monkeypatch: pytest.MonkeyPatch, expected: Any) -> None:
    with light_session(monkeypatch) as (session, model, handed_over):
        loss = model.forward()
        loss.backward(retain_graph=True)
        first = [gradient.clone() for gradient in model.gradients()]
        loss.backward()
        assert same(first, expected)
        assert same(model.gradients(), expected)
        session.step()
        assert handed_over.lifetimes
        assert same(model.step(), expected)


def test_a_gradient_of_a_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    def of(model: Model) -> list[torch.Tensor]:
        (gradient,) = torch.autograd.grad(model.forward(), model.weights[:1], create_graph=True)
        gradient.square().sum().backward()
        return model.gradients()

    expected = of(Model())
    with light_session(monkeypatch) as (session, model, handed_over):
        assert same(of(model), expected)
        session.step()
        assert handed_over.lifetimes


@pytest.mark.parametrize("is_late", [False, True])
def test_a_write_to_what_was_saved_is_refused(monkeypatch: pytest.MonkeyPatch, is_late: bool) -> None:
    held = []
    with light_session(monkeypatch) as (session, model, _):
        loss = model.forward(lambda y: held.append(y) or y)  # type: ignore[func-returns-value]
        if is_late:
            gc.collect()
        with torch.no_grad():
            held.pop().mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        del loss
        model.gradients()
        session.step()
        model.step()
        session.step()
        assert host_bytes(session) == 0


def test_a_storage_that_the_program_holds_is_used_in_place(monkeypatch: pytest.MonkeyPatch, expected: Any) -> None:
    held = []
    with light_session(monkeypatch) as (session, model, handed_over):
        before = session.counters.copied_not_freed_bytes, session.counters.used_in_place
        assert same(model.step(lambda y: held.append(y) or y), expected)  # type: ignore[func-returns-value]
        session.step()
        assert handed_over.lifetimes == []
        assert session.counters.copied_not_freed_bytes > before[0]
        assert session.counters.used_in_place > before[1]
        assert "saved in no module" in session.report()


def test_a_storage_that_was_held_at_its_release_is_reloaded_later(
    monkeypatch: pytest.MonkeyPatch, expected: Any
) -> None:
    held = []
    with light_session(monkeypatch) as (session, model, handed_over):
        loss = model.forward(lambda y: held.append(y) or y)  # type: ignore[func-returns-value]
        held.clear()
        loss.backward()
        assert same(model.gradients(), expected)
        session.step()
        assert handed_over.lifetimes == []
        assert settling_of(session).is_expected


def test_a_write_through_data_to_a_held_storage_shows_as_in_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def of(model: Model) -> list[torch.Tensor]:
        held: list[torch.Tensor] = []
        loss = model.forward(lambda y: held.append(y) or y)  # type: ignore[func-returns-value]
        held[0].data.mul_(2)
        loss.backward()
        return model.gradients()

    expected = of(Model())
    with light_session(monkeypatch) as (_, model, _):
        assert same(of(model), expected)


def test_other_code_unpacks_what_the_gate_moved(monkeypatch: pytest.MonkeyPatch, expected: Any) -> None:
    with light_session(monkeypatch) as (_, model, handed_over):
        loss = model.forward()
        packed = next(one for one in saved_by(loss.grad_fn) if type(one) is LightSave)
        assert handed_over.lifetimes == []
        tensor = unpack_without_hooks(packed)
        assert type(packed.full()) is PackedView
        assert len(handed_over.lifetimes) == 1
        assert torch.isfinite(tensor).all()
        loss.backward()
        assert same(model.gradients(), expected)
        assert len(handed_over.lifetimes) == 1, "the others stay light"


@pytest.mark.parametrize("plan", [OFFLOADS_SOME, OFFLOADS_ALL])
def test_the_gate_moves_what_a_plan_of_a_budget_offloads(plan: str) -> None:
    """Such a session times its copies, because it records steps."""
    plain = Network()
    expected = plain.step()
    with settled_session(plan) as (session, network):
        before = session.counters.storages
        with python_calls() as called:
            gradients = network.step()
        session.step()
        assert settling_of(session).is_expected
        assert session.counters.storages - before >= 5
        assert called.count("_save") <= 1
        assert all(
            a is not None and b is not None and torch.equal(a, b) for a, b in zip(gradients, expected, strict=True)
        )
