"""Random whole trainings come out the same, bit for bit, in every way that training state leaves the device."""

from __future__ import annotations

import pytest

from tests.fuzz.outcomes import Kind
from tests.fuzz.program import Program, flattened
from tests.fuzz.run import Drawn
from tests.fuzz.test_programs import differences
from tests.fuzz.trainings.grammar import BLOCKS, STATEMENTS
from tests.fuzz.trainings.plot import program_of
from tests.fuzz.trainings.ways import BUDGETS, WAYS, way_of
from vdnn.runtime.training_state.state_room import StateRoom

_CHUNK = 100
_TRAININGS = Drawn("training")


@pytest.mark.filterwarnings("ignore")
def test_fifty_trainings_are_as_plain() -> None:
    found = differences(range(50), _TRAININGS)
    assert not found, "\n\n".join(found)


@pytest.mark.drawn(of=20)  # `.ci/run` runs random trainings besides
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("first", range(50, 2000, _CHUNK))
def test_two_thousand_trainings_are_as_plain(first: int) -> None:
    found = differences(range(first, min(first + _CHUNK, 2000)), _TRAININGS)
    assert not found, "\n\n".join(found)


def test_a_training_is_a_function_of_its_seed() -> None:
    assert program_of(3) == program_of(3)
    assert program_of(3) != program_of(4)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("budget", ["planned 120", "planned min", "changing"])
def test_state_begins_to_stay_and_leaves_again_in_long_trainings(budget: str, monkeypatch: pytest.MonkeyPatch) -> None:
    leave, kept = StateRoom.leave, list[int]()

    def counted(self: StateRoom) -> int:
        kept.append(sum(map(len, self.staying.values())))
        return leave(self)

    monkeypatch.setattr(StateRoom, "leave", counted)
    for seed in range(8):
        program = program_of(seed, f"all, {budget}")
        assert _TRAININGS.verdict_of(program).kind is not Kind.DIFFERENT
    assert any(kept)


@pytest.mark.slow
def test_two_thousand_trainings_have_all_ways_budgets_and_productions() -> None:
    programs: list[Program] = [program_of(seed) for seed in range(2000)]
    assert {way_of(one.mode).name for one in programs} == set(WAYS)
    assert {way_of(one.mode).budget for one in programs} == set(BUDGETS)
    assert {one.name for program in programs for one in flattened(program.body)} == {*STATEMENTS, *BLOCKS}
