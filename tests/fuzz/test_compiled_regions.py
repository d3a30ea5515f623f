"""Random compiled regions under a budget come out the same, bit for bit."""

from __future__ import annotations

import pytest

from tests.fuzz.compiled_regions import BLOCKS, MODES, program_of
from tests.fuzz.program import flattened
from tests.fuzz.run import Drawn
from tests.fuzz.test_programs import differences

pytestmark = pytest.mark.filterwarnings("ignore")
_COMPILED = Drawn("compiled")


def test_three_compiled_regions_are_as_plain() -> None:
    found = differences(range(3), _COMPILED)
    assert not found, "\n\n".join(found)


@pytest.mark.drawn(of=2)
@pytest.mark.slow
@pytest.mark.parametrize("first", range(3, 43, 10))
def test_forty_compiled_regions_are_as_plain(first: int) -> None:
    found = differences(range(first, first + 10), _COMPILED)
    assert not found, "\n\n".join(found)


def test_a_thousand_compiled_regions_have_all_budgets_and_blocks() -> None:
    programs = [program_of(seed) for seed in range(1000)]
    assert {one.mode for one in programs} == set(MODES)
    assert {one.name for program in programs for one in flattened(program.body)} == {*BLOCKS, "checkpointed", "whole"}
    assert programs[3] == program_of(3) != program_of(4)
