"""Forms: the saves of a step without their sizes. They identify a step of another shape."""

from __future__ import annotations

import re
from typing import NamedTuple

from vdnn.step.recording import SaveKey


class Form(NamedTuple):
    """A save without its sizes. `occurrence` numbers the saves of a step that are equal in all other fields."""

    producer: str
    module: str
    dtype: str
    dimensions: int
    occurrence: int


NO_FORM = Form("", "", "", 0, 0)


class Forms:
    """The forms of one step, in the order of its saves."""

    def __init__(self) -> None:
        self._occurrences: dict[tuple[str, str, str, int], int] = {}

    def of(self, key: SaveKey) -> Form:
        """The form of the next save."""
        alike = key.producer, key.module, key.dtype, len(key.size)
        occurrence = self._occurrences.get(alike, 0)
        self._occurrences[alike] = occurrence + 1
        return Form(*alike, occurrence)


def without_numbers(form: Form) -> tuple[str, str, str, int]:
    """The part of a form that is the same in all layers, experts and repetitions."""
    return form.producer, re.sub(r"\d+", "#", form.module), form.dtype, form.dimensions


def is_within(key: SaveKey, other: SaveKey) -> bool:
    """True if no dimension of a save is larger than that of another one of its form."""
    return len(key.size) == len(other.size) and all(map(int.__le__, key.size, other.size))
