"""Room in blocks against room in a list."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vdnn.planning.policies.room import Room

INTERVALS = 150
PLACES = st.integers(0, INTERVALS - 1)
TAKINGS = st.lists(st.tuples(PLACES, PLACES, st.integers(0, 30)), min_size=10, max_size=30)


@given(narrow=st.dictionaries(PLACES, st.integers(-5, 60), max_size=5), takings=TAKINGS)
def test_blocks_change_nothing(narrow: dict[int, int], takings: list[tuple[int, int, int]]) -> None:
    plain = [narrow.get(interval, 80) for interval in range(INTERVALS)]
    blocks = Room(plain)
    for highest, low, nbytes in takings:
        interval = highest
        while interval >= low and plain[interval] >= nbytes:
            plain[interval] -= nbytes
            interval -= 1
        assert blocks.take_down(highest, low, nbytes) == interval
    assert [blocks.at(interval) for interval in range(len(plain))] == plain


def test_a_block_that_was_used_up_holds_no_more() -> None:
    room = Room([10] * 200)
    assert room.take_down(199, 0, 6) == -1
    assert room.take_down(199, 0, 6) == 199


def test_a_whole_block_is_taken_at_once_and_so_is_what_it_lacks_one_by_one() -> None:
    room = Room([10] * 200)
    assert room.take_down(199, 0, 4) == -1
    assert room.take_down(150, 130, 4) == 129
    assert room.take_down(199, 0, 4) == 150
    assert [room.at(interval) for interval in (0, 129, 130, 150, 151)] == [6, 6, 2, 2, 2]
