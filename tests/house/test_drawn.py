"""`make test` leaves one of the tests that differ in few parameters only, and not always that of the same value; and
`make test-fast` some of those that take long together."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, cast

import pytest

from tests.drawn import draw_marked, draw_one
from tests.thinned import families, one_in, thin

ROOT = Path(__file__).resolve().parents[2]

NAMES = {1: "early", 2: "late"}
POLICIES = {"all": "moved", "none": "kept"}


class Item:
    """A collected test, as far as it is looked at."""

    def __init__(self, nodeid: str, **params: Any) -> None:
        self.nodeid = nodeid
        self.marks: list[pytest.MarkDecorator] = []
        if params:
            self.callspec = type("CallSpec", (), {"params": params})

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        self.marks.append(mark)


def drawn(*items: Item) -> list[Item]:
    draw_one(cast("list[pytest.Item]", items), {"schedule": NAMES, "policy": POLICIES})
    return [item for item in items if not item.marks]


def test_one_of_each_pair_is_left_and_each_value_has_its_share() -> None:
    pairs = [Item(f"test_{test}[{name}-x]", schedule=value) for test in range(100) for value, name in NAMES.items()]
    left = drawn(*pairs)
    assert len({item.nodeid.partition("[")[0] for item in left}) == len(left) == 100
    assert 25 < sum("early" in item.nodeid for item in left) < 75
    assert {mark.name for item in pairs for mark in item.marks} == {"full"}


def test_of_tests_that_differ_in_two_parameters_one_is_left() -> None:
    both = [(value, name, policy, word) for value, name in NAMES.items() for policy, word in POLICIES.items()]
    items = [
        Item(f"test_{test}[{name}-{word}]", schedule=value, policy=policy)
        for test in range(100)
        for value, name, policy, word in both
    ]
    left = drawn(*items)
    assert len({item.nodeid.partition("[")[0] for item in left}) == len(left) == 100
    assert len({item.nodeid.partition("[")[2] for item in left}) == len(both)


def test_tests_that_differ_otherwise_or_have_other_values_all_stay() -> None:
    items = [
        Item("test_a[early-x]", schedule=1),
        Item("test_a[early-y]", schedule=1),
        Item("test_b[never]", schedule=3),
        Item("test_c[early]", other=1),
        Item("test_d"),
    ]
    assert drawn(*items) == items


class Marked(Item):
    """A test that says how few of its items are enough."""

    def __init__(self, nodeid: str, of: int) -> None:
        super().__init__(nodeid)
        self.of = of

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        if name == "drawn":
            return pytest.mark.drawn(of=self.of).mark
        return next((mark.mark for mark in self.marks if mark.name == name), None)


def test_of_a_marked_test_so_many_are_left_and_never_none() -> None:
    items = [Marked(f"test_a[{number}]", of=4) for number in range(9)] + [Marked("test_b[x]", of=4)]
    items[0].add_marker(pytest.mark.full)  # does not count
    draw_marked(cast("list[pytest.Item]", items))
    left = [item.nodeid for item in items if not item.marks]
    assert len(left) == 3
    assert left[-1] == "test_b[x]"
    assert len(items[0].marks) == 1


class Thinned(Item):
    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return next((mark.mark for mark in self.marks if mark.name == name), None)


def test_a_thinned_test_leaves_one_in_so_many_to_the_fast_lane_and_the_rest_is_slow() -> None:
    items = [Thinned(f"test_a[{number}]") for number in range(9)] + [Thinned("test_b[0]"), Thinned("test_c")]
    items[0].add_marker(pytest.mark.full)
    thin(cast("list[pytest.Item]", items), {"test_a": 4, "test_c": 4})
    left = [item.nodeid.partition("[")[0] for item in items if not item.marks]
    assert left == ["test_a", "test_a", "test_b", "test_c"]
    assert {mark.name for item in items[1:] for mark in item.marks} == {"slow"}


@pytest.mark.parametrize(
    ("count", "taken_s", "expected"), [(1, 9.0, 1), (2, 9.0, 2), (50, 0.1, 1), (50, 1.0, 4), (50, 10.0, 50)]
)
def test_dear_tests_are_thinned_to_a_share_and_cheap_ones_to_a_quarter(
    count: int, taken_s: float, expected: int
) -> None:
    assert one_in(count, taken_s) == expected


def test_every_thinned_test_is_there() -> None:
    missing = []
    for name, of in families().items():
        file, *_, function = name.split("::")
        assert of > 1
        if not re.search(rf"def {function}\b", (ROOT / file).read_text() if (ROOT / file).exists() else ""):
            missing.append(name)
    assert missing == [], "python -m tests.thinned writes the list"
