"""Steps that differ in few bytes are of one kind, whatever the forms of these bytes."""

from __future__ import annotations

import pytest

from vdnn.runtime.steps.kinds import AlikeKinds, Begin, Kind, kind_with
from vdnn.step.forms import NO_FORM, Form

BEGIN = Begin(NO_FORM, 1)


def form(producer: str) -> Form:
    return NO_FORM._replace(producer=producer)


def kind_of(saves: dict[Form, int]) -> Kind:
    kind = 0
    for one in saves:
        kind = kind_with(kind, one)
    return kind


LARGE = {form(f"Mm{number}"): 1000 for number in range(10)}


@pytest.mark.parametrize(("nbytes", "is_alike"), [(100, True), (2000, False)])
@pytest.mark.parametrize("is_more", [True, False])
def test_a_kind_with_few_bytes_more_or_less_is_the_earlier_one(nbytes: int, is_alike: bool, is_more: bool) -> None:
    other = {**LARGE, form("Norm"): nbytes}
    first, second = (LARGE, other) if is_more else (other, LARGE)
    kinds = AlikeKinds()
    assert kinds.kind_for(kind_of(first), BEGIN, first) == kind_of(first)
    assert (kinds.kind_for(kind_of(second), BEGIN, second) == kind_of(first)) is is_alike


def test_another_model_is_another_kind() -> None:
    kinds = AlikeKinds()
    kinds.kind_for(1, BEGIN, LARGE)
    assert kinds.kind_for(2, BEGIN._replace(model=2), LARGE) == 2


def test_kinds_that_came_first_are_forgotten_first() -> None:
    kinds = AlikeKinds()
    for number in range(1000):
        kinds.kind_for(number, BEGIN, {form(str(number)): 1})
    assert len(kinds._first) == len(kinds._examples) < 1000
    assert kinds.kind_for(2000, BEGIN, {form("0"): 1}) == 2000
    assert kinds.kind_for(2001, BEGIN, {form("999"): 1}) == 999
