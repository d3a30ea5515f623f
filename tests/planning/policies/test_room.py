"""The native core's tree of free memory by interval gives the same answers as a list."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vdnn import _C

INTERVALS = 150
PLACES = st.integers(0, INTERVALS - 1)
TAKINGS = st.lists(st.tuples(PLACES, PLACES, st.integers(0, 30)), min_size=10, max_size=30)


@given(narrow=st.dictionaries(PLACES, st.integers(-5, 60), max_size=5), takings=TAKINGS, at_once=st.booleans())
def test_a_tree_takes_what_a_list_does(
    narrow: dict[int, int], takings: list[tuple[int, int, int]], at_once: bool
) -> None:
    plain = [narrow.get(interval, 80) for interval in range(INTERVALS)]
    room = _C.Room(plain)
    below = []
    for highest, lowest, nbytes in takings:
        interval = highest
        while interval >= lowest and plain[interval] >= nbytes:
            plain[interval] -= nbytes
            interval -= 1
        below.append(interval)
    if at_once:
        assert room.take_down(takings) == below
    else:
        assert [room.take_down([taking])[0] for taking in takings] == below


def test_what_was_used_up_holds_no_more() -> None:
    room = _C.Room([10] * 200)
    assert room.take_down([(199, 0, 6), (199, 0, 6)]) == [-1, 199]


def test_nothing_is_taken_above_where_it_may_end() -> None:
    room = _C.Room([10] * 20)
    assert room.take_down([(10, 11, 10), (10, 8, 10), (19, 0, 10)]) == [10, 7, 10]
