"""Each of the faults of issue #14, planted again, is found within a stated number of programs.

A fault is planted by undoing its mend with monkeypatch. `in_the_tree` is for those that are not mended yet: they are
there anyway. When one is, its function here undoes that, and the programs named here show that it does.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from tests.fuzz.outcomes import Kind, verdict_of, warnings_of_vdnn
from tests.fuzz.plot import program_of
from tests.fuzz.properties import child_dies, first_seed, growing_book, interrupted_badly
from tests.fuzz.run import prepare

Plant = Callable[[pytest.MonkeyPatch], None]


def in_the_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is to be undone."""


@dataclass(frozen=True)
class Fault:
    """Is found among `programs` programs from `first` on that have all productions of `names`, by what `says` finds in
    the verdict."""

    number: str
    mode: str
    first: int
    programs: int
    names: frozenset[str]
    says: str
    plant: Plant = in_the_tree

    def __str__(self) -> str:
        return f"{self.number} in {self.mode}"


def _fault(number: str, mode: str, first: int, programs: int, names: str, says: str, plant: Plant = in_the_tree) -> Fault:
    return Fault(number, mode, first, programs, frozenset(names.split()), says, plant)


NUMBERS = r"(grad|loss|parameter|buffer) ?\d*: .*, ours "
FAULTS = [
#FAULTS
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_planted_fault_is_found(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare()
    fault.plant(monkeypatch)
    assert found_by(fault) is not None, "not within its number of programs"


def found_by(fault: Fault) -> int | None:
    """The seed that finds it."""
    tried = 0
    seed = fault.first
    with warnings_of_vdnn():
        while tried < fault.programs:
            program = program_of(seed, fault.mode)
            if fault.names <= program.names():
                tried += 1
                verdict = verdict_of(program)
                if verdict.kind is Kind.DIFFERENT and re.search(fault.says, verdict.what):
                    return seed
            seed += 1
    return None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("finds", "mode", "programs", "plant"),
    [
        pytest.param(child_dies, "vdnn-all", 2, in_the_tree, id="12, a fork that starts threads"),
        pytest.param(growing_book, "rebuild-all", 5, in_the_tree, id="13, books that grow in rebuild-all"),
        pytest.param(growing_book, "auto 60", 10, in_the_tree, id="13, books that grow in a plan"),
        pytest.param(interrupted_badly, "rebuild-all", 5, in_the_tree, id="14, grad mode after an interrupt"),
    ],
)
def test_a_planted_fault_breaks_a_property(
    finds: Callable[..., str | None], mode: str, programs: int, plant: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare()
    plant(monkeypatch)
    with warnings_of_vdnn():
        assert first_seed(finds, range(programs), mode) is not None
