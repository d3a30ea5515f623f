"""How two lists of saves differ: which storages only one of them has, and by how many bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

from benchmarks.cuda_saves.saves import Save

# Seeds and counters of random numbers, and empty reserves: a scalar or two.
SEEDS = 16


@dataclass(frozen=True, slots=True)
class Difference:
    """Saves that only the rehearsal has, and saves that only CUDA has, at one place of the step."""

    rehearsed: tuple[Save, ...]
    cuda: tuple[Save, ...]

    def __str__(self) -> str:
        said = "; ".join(map(str, self.rehearsed)) or "nothing"
        true = "; ".join(map(str, self.cuda)) or "nothing"
        return f"the rehearsal has {said}, CUDA has {true}"


def differences(rehearsed: Sequence[Save], cuda: Sequence[Save]) -> list[Difference]:
    """All places where the lists differ. Saves of up to SEEDS bytes are left out of both."""
    ours = [one for one in rehearsed if one.nbytes > SEEDS]
    theirs = [one for one in cuda if one.nbytes > SEEDS]
    blocks = SequenceMatcher(None, ours, theirs, autojunk=False).get_opcodes()
    return [Difference(tuple(ours[a:b]), tuple(theirs[c:d])) for kind, a, b, c, d in blocks if kind != "equal"]


def byte_error(rehearsed: Sequence[Save], cuda: Sequence[Save]) -> float:
    """The bytes that the rehearsal has too much (or, negative, too little), as a share of CUDA's."""
    total = sum(one.nbytes for one in cuda)
    return (sum(one.nbytes for one in rehearsed) - total) / total if total else 0.0
