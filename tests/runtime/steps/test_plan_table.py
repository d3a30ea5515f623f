"""The sized plans of a table, and what is remembered of steps that no plan serves, without a session."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tests.planning.recordings import chain
from vdnn.errors import BudgetError, VdnnError
from vdnn.runtime.steps.kinds import Unplannable
from vdnn.runtime.steps.plan_table import PlanTable
from vdnn.step.made_steps import first_save


def sized_plan(size: int, steps: int) -> Any:
    return SimpleNamespace(first=SimpleNamespace(size=(size,)), nbytes=size, steps=steps)


def test_a_table_of_sixteen_plans_removes_the_least_followed_and_never_the_largest() -> None:
    table = PlanTable(recorded=None)  # type: ignore[arg-type]
    for size in range(1, 17):
        table.add(sized_plan(size, steps=100 - size))
    assert [one.nbytes for one in table.plans] == list(range(1, 17))
    table.add(sized_plan(17, steps=0))
    assert [one.nbytes for one in table.plans] == [*range(1, 16), 17]


def test_the_largest_of_the_plans_that_begin_alike_stays() -> None:
    table = PlanTable(recorded=None)  # type: ignore[arg-type]
    first, higher, lower = sized_plan(4, steps=1), sized_plan(4, steps=0), sized_plan(4, steps=0)
    higher.nbytes, lower.nbytes = 9, 8
    for one in (first, higher, lower):
        table.add(one)
    assert table.plans == [higher]


@pytest.mark.parametrize(
    ("error", "too_many_bytes"),
    [
        # With 40 bytes less resident the step would fit, so with 39 bytes less it does not.
        (BudgetError(budget_bytes=300, least_bytes=340, where="a step", resident_bytes=100), 100 - 39),
        (VdnnError("the recording cannot be planned"), 100),
    ],
)
def test_a_step_without_a_plan_is_recorded_again_if_less_is_resident(error: VdnnError, too_many_bytes: int) -> None:
    recording = chain([10, 20])
    assert recording.resident_bytes == 100
    known, first = Unplannable(), first_save(recording)
    known.note(3, recording, error)
    assert known.has(3, first, too_many_bytes)
    assert not known.has(3, first, too_many_bytes - 1)
    assert not known.has(4, first, too_many_bytes), "another kind"
    assert not known.has(3, replace(first, size=(7,)), too_many_bytes), "another size"
    assert not known.has(3, None, too_many_bytes)
