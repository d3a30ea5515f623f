"""A second step under a plan that is repeated from the first one reserves what it would if it ran."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.runtime.rigs.virtual_training import MODELS, loss_of
from vdnn.hardware import load_profile
from vdnn.planning.catalogue import make_planner
from vdnn.planning.costs import profile_costs
from vdnn.planning.least_memory import least_bytes
from vdnn.planning.planned_step import plan_step
from vdnn.runtime.machine.caching_allocator import CachingAllocator
from vdnn.runtime.machine.repeated_step import StepEvents
from vdnn.runtime.rehearsal.rehearsal import Reserved, rehearse
from vdnn.runtime.rehearsal.subjects import Staged, Subject


def subject(name: str) -> Subject:
    def staged() -> Staged:
        model, inputs = MODELS[name]()
        return Staged(model, lambda: loss_of(model(*inputs)).backward(), inputs)

    return Subject(staged)


def keeping_its_output() -> Subject:
    """Each step allocates what the next one frees."""

    def staged() -> Staged:
        model, x, kept = nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 512)), torch.ones(2048, 512), []

        def step() -> None:
            kept[:] = [model(x)]
            kept[0].square().mean().backward()

        return Staged(model, step, (x,))

    return Subject(staged)


SUBJECTS: dict[str, Callable[[], Subject]] = {name: lambda name=name: subject(name) for name in MODELS}  # type: ignore[misc]
SUBJECTS["keeping its output"] = keeping_its_output


def reserved(made: Subject, share: float, optimizer: str | None) -> Reserved | None:
    card = load_profile("titan-x")
    recording = rehearse(made, card, optimizer=optimizer, min_bytes=0).recording
    least = least_bytes(recording)
    budget = least + int(share * (recording.peak_bytes - least))
    planned = plan_step(recording, profile_costs(card), budget, make_planner("auto"), certify=False)
    return rehearse(made, card, plan=planned.plan, optimizer=optimizer, min_bytes=0).reserved


@pytest.mark.parametrize("optimizer", [None, "adamw"])
@pytest.mark.parametrize("share", [0.1, 0.6])
@pytest.mark.parametrize("name", SUBJECTS)
def test_a_repeated_step_reserves_what_one_that_runs_does(
    name: str, share: float, optimizer: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    repeat, could = StepEvents.repeat, []

    def noted(self: StepEvents, allocators: tuple[CachingAllocator, ...]) -> bool:
        could.append(repeat(self, allocators))
        return could[-1]

    monkeypatch.setattr(StepEvents, "repeat", noted)
    found = reserved(SUBJECTS[name](), share, optimizer)
    monkeypatch.setattr(StepEvents, "repeat", lambda *_: False)
    assert found == reserved(SUBJECTS[name](), share, optimizer)
    assert could == [True]


def events(before: dict[int, int], *happened: tuple[int, int | None]) -> StepEvents:
    step = StepEvents(before)
    for key, nbytes in happened:
        step.free(key) if nbytes is None else step.allocate(key, nbytes)
    return step


def served(step: StepEvents) -> CachingAllocator | None:
    allocator = CachingAllocator()
    for key, nbytes in ((1, 4096), (2, 8192), (3, 4096)):
        allocator.allocate(key, nbytes)
    return allocator if step.repeat([allocator]) else None


def test_what_a_step_frees_is_what_the_one_before_made() -> None:
    step = events({9: 4096}, (1, 4096), (9, None), (2, 8192), (2, None))
    allocator = served(step)
    assert allocator is not None
    assert allocator.allocated_bytes == 4096 + 8192 + 4096  # 1 was freed, and its successor made


@pytest.mark.parametrize(
    "step",
    [
        events({}, (1, 4096)),  # grows with each step
        events({9: 512}, (9, None)),
        events({9: 512}, (1, 4096), (9, None)),
    ],
)
def test_a_step_that_leaves_other_storages_than_it_found_is_not_repeated(step: StepEvents) -> None:
    assert served(step) is None
