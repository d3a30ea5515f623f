"""Random whole trainings come out the same, bit for bit, in every way that training state leaves the device."""

from __future__ import annotations

from tests.fuzz.program import Program, flattened
from tests.fuzz.trainings.grammar import BLOCKS, STATEMENTS
from tests.fuzz.trainings.plot import program_of
from tests.fuzz.trainings.ways import BUDGETS, WAYS, way_of


def test_a_training_is_a_function_of_its_seed() -> None:
    assert program_of(3) == program_of(3)
    assert program_of(3) != program_of(4)


def test_two_thousand_trainings_have_all_ways_budgets_and_productions() -> None:
    programs: list[Program] = [program_of(seed) for seed in range(2000)]
    assert {way_of(one.mode).name for one in programs} == set(WAYS)
    assert {way_of(one.mode).budget for one in programs} == set(BUDGETS)
    assert {one.name for program in programs for one in flattened(program.body)} == {*STATEMENTS, *BLOCKS}
