"""Each of the faults of issue #14, planted again, is found within a stated number of programs.

A fault is planted by undoing its mend with monkeypatch. `in_the_tree` is for those that are not mended yet: they are
there anyway. When one is, its function here undoes that, and the programs named here show that it does.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from tests.fuzz.outcomes import MODIFIED, Kind, verdict_of, warnings_of_vdnn
from tests.fuzz.plot import program_of
from tests.fuzz.properties import child_dies, first_seed, growing_book, interrupted_badly
from tests.fuzz.run import prepare

Plant = Callable[[pytest.MonkeyPatch], None]


def in_the_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is to be undone."""


@dataclass(frozen=True)
class Fault:
    """It is found among `programs` programs from `first` on that have all productions of `names`, where `says` finds
    something in the verdict or in a warning."""

    number: str
    mode: str
    first: int
    programs: int
    names: frozenset[str]
    says: str
    plant: Plant = in_the_tree

    def __str__(self) -> str:
        return f"{self.number} in {self.mode}"


def _fault(
    number: str, mode: str, first: int, programs: int, names: str, says: str, plant: Plant = in_the_tree
) -> Fault:
    return Fault(number, mode, first, programs, frozenset(names.split()), says, plant)


NUMBERS = r"(grad|loss|parameter|buffer) ?\d*: .*, ours "
FAULTS = [
    _fault("1", "drawn", 2100, 20, "lying_norm", NUMBERS),
    _fault("2", "rebuild-all", 3250, 20, "custom", NUMBERS),
    _fault("2b", "vdnn-all", 0, 60, "custom", f"ours has no error, plain .*{MODIFIED}"),
    _fault("3", "rebuild-all", 0, 200, "flags", NUMBERS),
    _fault("4", "rebuild-all", 0, 200, "write_parameter", NUMBERS),
    _fault("5", "rebuild-all", 3450, 20, "flags_around", NUMBERS),
    _fault("6", "auto min", 140, 10, "step_in_backward", "has no plan under"),
    _fault("8", "vdnn-all", 0, 30, "transform", "BatchedTensorImpl"),
    _fault("9", "vdnn-all", 0, 30, "transform", "invalid python storage"),
    _fault("10", "vdnn-all", 0, 20, "nested", "set_data|NestedTensorImpl"),
    _fault("11", "vdnn-all", 0, 20, "traced", "UntypedStorage"),
    _fault("15", "rebuild-all", 300, 20, "max_pool", "does not come out .* max_pool indices"),
    _fault("16", "auto 80", 280, 20, "step", "3 of at most 3 times"),
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
    with warnings_of_vdnn() as said:
        while tried < fault.programs:
            program = program_of(seed, fault.mode)
            if fault.names <= program.names():
                tried += 1
                said.clear()
                verdict = verdict_of(program)
                found = [verdict.what] if verdict.kind is Kind.DIFFERENT else []
                if any(re.search(fault.says, one) for one in [*found, *said]):
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
