"""The place of a step in its plan, if it lacks saves of the plan or has others."""

from __future__ import annotations

from typing import Any

import pytest

from tests.planning.recordings import chain, key
from vdnn.planning.footprint import offload_everything
from vdnn.runtime.steps.executor import Executor
from vdnn.step.plan import make_plan


class Storage:
    nbytes = 10


@pytest.fixture
def executor() -> Executor:
    recording = chain([10] * 30)
    made = Executor(make_plan(recording, "everything", offload_everything(recording)))
    made.begin_step()
    return made


def lifetimes_of(executor: Executor, *numbers: int) -> list[int | None]:
    """The planned lifetimes that saves with these numbers of the recording begin, one after the other."""
    kept: list[Any] = [Storage() for _ in numbers]
    forms = [executor.saves[number].form for number in numbers]
    return [
        executor.saved(one, key(number), form, is_new=True)
        for one, number, form in zip(kept, numbers, forms, strict=True)
    ]


def test_a_step_that_lacks_up_to_eight_saves_goes_on_behind_them(executor: Executor) -> None:
    assert lifetimes_of(executor, 0, 9, 10) == [0, 9, 10]
    assert executor.differences == 1


def test_a_save_further_ahead_may_be_another_one_of_its_kind_until_a_second_one_agrees(executor: Executor) -> None:
    assert lifetimes_of(executor, 0, 10, 11, 12) == [0, None, 11, 12]
    executor.begin_step()
    assert lifetimes_of(executor, 0, 20, 1, 2) == [0, None, 1, 2], "the part between is not skipped"
