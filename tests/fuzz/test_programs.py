"""Random programs give the same bits and the same errors in a session as in plain PyTorch."""

from __future__ import annotations

import pytest

from tests.fuzz.outcomes import Kind, warnings_of_vdnn
from tests.fuzz.plot import MODES, program_of
from tests.fuzz.program import Program, flattened
from tests.fuzz.run import Drawn

_CHUNK = 100


def differences(seeds: range, drawn: Drawn) -> list[str]:
    found = []
    with warnings_of_vdnn():
        for seed in seeds:
            program = drawn.program_of(seed)
            verdict = drawn.verdict_of(program)
            if verdict.kind is Kind.DIFFERENT:
                again = f"python -m tests.fuzz.run --grammar {drawn.grammar} --shrink {seed}"
                found.append(f"{program.listing()}\n{verdict}\n{again}")
    return found


@pytest.mark.filterwarnings("ignore")
def test_fifty_programs_are_as_plain() -> None:
    found = differences(range(50), Drawn("steps"))
    assert not found, "\n\n".join(found)


@pytest.mark.drawn(of=8)
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("first", range(50, 2000, _CHUNK))
def test_two_thousand_programs_are_as_plain(first: int) -> None:
    found = differences(range(first, min(first + _CHUNK, 2000)), Drawn("steps"))
    assert not found, "\n\n".join(found)


def test_a_program_is_a_function_of_its_seed() -> None:
    assert program_of(3) == program_of(3)
    assert program_of(3) != program_of(4)


@pytest.mark.slow
def test_two_thousand_programs_have_all_modes_and_most_of_the_grammar() -> None:
    programs: list[Program] = [program_of(seed) for seed in range(2000)]
    assert {one.mode for one in programs} == set(MODES)
    assert len({one.name for program in programs for one in flattened(program.body)}) > 40
