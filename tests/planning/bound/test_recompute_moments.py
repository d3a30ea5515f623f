"""When a storage can be rebuilt: by whom it is asked for, and whether there is room for it."""

from __future__ import annotations

import itertools

from hypothesis import given, settings

from tests.planning.recordings import RESIDENT, any_rebuildable_recording, chain, rebuildable
from vdnn.planning.bound.recompute_moments import RebuildMoments
from vdnn.planning.gaps import gaps_of
from vdnn.planning.least_memory import least_bytes
from vdnn.planning.recomputing import candidates_of, with_rebuilds
from vdnn.step.recording import PointKind, Recording


def moments_of(recording: Recording, budget_bytes: int) -> RebuildMoments:
    return RebuildMoments(recording, gaps_of(recording), budget_bytes)


def test_it_is_rebuilt_at_its_first_use_or_with_what_is_made_from_it() -> None:
    """Saved at 0 to 2, used at 3 to 5 in reverse; the third is made from the second, the second from the first."""
    both = rebuildable(rebuildable(chain([10, 20, 30]), 1, (0,), compute_ns=1), 2, (1,), compute_ns=1)
    moments = moments_of(both, both.peak_bytes)
    assert moments.of == {1: (3, 4), 2: (3,)}
    assert moments.made_from == {0: [1], 1: [2]}


def test_there_has_to_be_room_for_what_it_reads_and_needs() -> None:
    """At its use the second and the first, which it is made from, are there, and five bytes that it needs besides."""
    recording = rebuildable(chain([10, 20, 30]), 1, (0,), compute_ns=1, extra=5)
    needed = RESIDENT + 10 + 20 + 5
    assert moments_of(recording, needed).of == {1: (4,)}
    assert moments_of(recording, needed - 1).of == {1: ()}


def test_there_has_to_be_room_for_it_up_to_its_use() -> None:
    """Rebuilt at 3 for the third, the second is there while the third is read; at its own use the third has gone."""
    both = rebuildable(rebuildable(chain([10, 20, 30]), 1, (), compute_ns=1), 2, (1,), compute_ns=1)
    needed = RESIDENT + 20 + 30
    assert moments_of(both, needed).of == {1: (3, 4), 2: (3,)}
    assert moments_of(both, needed - 1).of == {1: (4,), 2: ()}


def rebuilt_at(recording: Recording, chosen: tuple[int, ...]) -> dict[int, int]:
    """By the first of the step's own points at or behind the place at which each is made: it is given up before, and
    is first used by a rebuild of another, or by its own use."""
    missing, found = set(chosen), {}
    for place, point in enumerate(recording.points):
        waiting = [point.lifetime] if point.kind is PointKind.USE else []
        while waiting:
            one = waiting.pop()
            if one in missing and one is not None:
                missing.discard(one)
                found[one] = place
                rebuild = recording.lifetimes[one].rebuild
                waiting += rebuild.inputs if rebuild else ()
    return found


@settings(max_examples=150, deadline=None)
@given(recording=any_rebuildable_recording(6))
def test_whatever_fits_rebuilds_at_these_moments(recording: Recording) -> None:
    """Each choice of rebuilds under the least budget that it can be had for, whatever is moved besides."""
    candidates = candidates_of(recording)
    for count in range(1, len(candidates) + 1):
        for chosen in itertools.combinations(candidates, count):
            moments = moments_of(recording, least_bytes(with_rebuilds(recording, chosen)))
            for one, moment in rebuilt_at(recording, chosen).items():
                assert moment in moments.of[one], (chosen, one)
