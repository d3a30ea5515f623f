"""A training waits for its plans: a session searches a fraction as long as `vdnn plan`, for nearly the same steps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import vdnn
from vdnn import _C
from vdnn.hardware import load_profile
from vdnn.planning.costs import profile_costs
from vdnn.planning.least_memory import least_bytes
from vdnn.planning.planned_step import PlannedStep, plan_step
from vdnn.planning.policies import PlanRequest
from vdnn.planning.search import auto
from vdnn.planning.search.auto import Auto
from vdnn.planning.search.effort import QUICK, Effort
from vdnn.planning.search.plan_search import make_plan_search
from vdnn.step.recording import Recording

_MACHINE = "h100"
_COSTS = profile_costs(load_profile(_MACHINE))
_SHARES = (0.75, 0.6)  # of the peak of the step with everything kept
_NEARBY = 1.01  # times a quick plan's step
_FEWER, _LONGER = 5, 1.005  # times


def trained(lengths: Sequence[int], **options: Any) -> vdnn.Session:
    """An encoder whose attention and wide layers may be recomputed or moved, on a virtual machine."""
    with vdnn.VirtualMachine(_MACHINE) as machine:
        model = nn.Sequential(
            *(nn.TransformerEncoderLayer(1024, 16, 4096, batch_first=True, norm_first=True) for _ in range(3))
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with vdnn.offload(device=machine, min_bytes=0, **options) as session:
            for length in lengths:
                model(torch.randn(16, length, 1024)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    return session


@functools.cache
def recorded() -> Recording:
    recording = trained([512] * 2, policy="keep", measure=True).recording
    assert recording is not None
    return recording


@pytest.fixture
def evaluations(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], int]]:
    """Returns the evaluations of moves since the last call."""
    searches: list[_C.PlanSearch] = []

    def remembered(request: PlanRequest, effort: Effort, known: Collection[int] = ()) -> _C.PlanSearch:
        searches.append(make_plan_search(request, effort, known))
        return searches[-1]

    monkeypatch.setattr(auto, "make_plan_search", remembered)

    def taken() -> int:
        total = sum(one.evaluations for one in searches)
        searches.clear()
        return total

    return taken


def planned(share: float, policy: str | Auto) -> PlannedStep:
    recording = recorded()
    return plan_step(recording, _COSTS, round(share * recording.peak_bytes), policy)


@pytest.mark.parametrize("share", _SHARES)
def test_a_quick_search_finds_nearly_the_same_step(share: float, evaluations: Callable[[], int]) -> None:
    full = planned(share, "auto")
    many = evaluations()
    quick = planned(share, Auto(QUICK))
    assert quick.fits
    assert 1 < quick.slowdown <= _LONGER * full.slowdown
    assert _FEWER * evaluations() < many


@pytest.mark.parametrize(("room", "tries_more"), [(0.02, True), (0.5, False)])
def test_a_quick_search_tries_more_choices_near_the_least_memory_and_fewer_where_there_is_room(
    room: float, tries_more: bool, evaluations: Callable[[], int]
) -> None:
    recording = recorded()
    least = least_bytes(recording)
    budget = round(least + room * (recording.peak_bytes - least))
    by_room = plan_step(recording, _COSTS, budget, Auto(QUICK))
    tried = evaluations()
    usual = plan_step(recording, _COSTS, budget, Auto(QUICK._replace(by_room=False)))
    assert tried > 1.5 * evaluations() if tries_more else tried < 0.8 * evaluations()
    assert by_room.slowdown <= _NEARBY * usual.slowdown


def test_a_session_searches_quickly(evaluations: Callable[[], int]) -> None:
    planned(_SHARES[-1], "auto")
    many = evaluations()
    session = trained([512] * 3, budget=round(_SHARES[-1] * recorded().peak_bytes))
    assert session.plan is not None
    assert session.plan.offloaded_bytes
    assert 0 < _FEWER * evaluations() < 2 * many  # the plan of the warm-up, and that of the step after it


def test_the_plan_of_nearly_the_same_step_shortens_the_search(evaluations: Callable[[], int]) -> None:
    quick = planned(_SHARES[-1], Auto(QUICK))
    many = evaluations()
    other = planned(_SHARES[0], Auto(QUICK))
    evaluations()
    near = planned(_SHARES[-1], Auto(QUICK).near(other.plan))
    assert near.fits
    assert near.slowdown <= _NEARBY * quick.slowdown
    assert 4 * evaluations() < 3 * many


def test_a_full_search_that_begins_from_a_plan_is_as_long(evaluations: Callable[[], int]) -> None:
    full = planned(_SHARES[-1], "auto")
    many = evaluations()
    again = planned(_SHARES[-1], Auto().near(full.plan))
    assert again.slowdown <= full.slowdown
    assert 2 * evaluations() > many


def test_a_new_size_is_planned_from_the_plan_of_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    known_to: list[Collection[int]] = []

    def remembered(request: PlanRequest, effort: Effort, known: Collection[int] = ()) -> _C.PlanSearch:
        known_to.append(known)
        return make_plan_search(request, effort, known)

    monkeypatch.setattr(auto, "make_plan_search", remembered)
    budget = round(_SHARES[-1] * recorded().peak_bytes)
    trained([512, 512, 256, 512, 256, 448], budget=budget)
    assert not known_to[0], "the first plan"
    assert known_to[-1], "the plan of a length between two others"
