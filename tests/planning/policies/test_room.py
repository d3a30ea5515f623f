"""Room in blocks against room in a list."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vdnn.planning.policies.room import Room

TAKINGS = st.lists(st.tuples(st.integers(0, 299), st.integers(0, 299), st.integers(0, 30)), max_size=30)


@given(room=st.lists(st.integers(-5, 400), min_size=1, max_size=300), takings=TAKINGS)
def test_blocks_change_nothing(room: list[int], takings: list[tuple[int, int, int]]) -> None:
    blocks, plain = Room(room), list(room)
    for high, low, nbytes in takings:
        highest = high % len(plain)
        interval = highest
        while interval >= low and plain[interval] >= nbytes:
            plain[interval] -= nbytes
            interval -= 1
        assert blocks.take_down(highest, low, nbytes) == interval
    assert [blocks.at(interval) for interval in range(len(plain))] == plain


def test_a_whole_block_is_taken_at_once_and_so_is_what_it_lacks_one_by_one() -> None:
    room = Room([10] * 200)
    assert room.take_down(199, 0, 4) == -1
    assert room.take_down(150, 130, 4) == 129
    assert room.take_down(199, 0, 4) == 150
    assert [room.at(interval) for interval in (0, 129, 130, 150, 151)] == [6, 6, 2, 2, 2]
