"""The moments at which a storage can be recomputed: its own uses and the recomputes of its readers, if there is
room."""

from __future__ import annotations

import itertools

from hypothesis import given, settings

from tests.drawn import examples
from tests.planning.recordings import RESIDENT, any_recomputable_recording, chain, recomputable
from vdnn.planning.bound.recompute_moments import RecomputeMoments
from vdnn.planning.gaps import gaps_of
from vdnn.planning.least_memory import least_bytes
from vdnn.planning.recomputing import candidates_of, with_recomputes
from vdnn.step.recording import PointKind, Recording


def moments_of(recording: Recording, budget_bytes: int) -> RecomputeMoments:
    return RecomputeMoments(recording, gaps_of(recording), budget_bytes)


def test_it_is_recomputed_at_its_first_use_or_with_what_is_made_from_it() -> None:
    """Saves are at 0 to 2, and uses at 3 to 5 in reverse. The third storage is recomputed from the second, and the
    second from the first.
    """
    both = recomputable(recomputable(chain([10, 20, 30]), 1, (0,), compute_ns=1), 2, (1,), compute_ns=1)
    moments = moments_of(both, both.peak_bytes)
    assert moments.of == {1: (3, 4), 2: (3,)}
    assert moments.made_from == {0: [1], 1: [2]}


def test_there_has_to_be_room_for_what_it_reads_and_needs() -> None:
    """At its own use the second storage is on the device with its input, the first, and five bytes of temporary
    memory."""
    recording = recomputable(chain([10, 20, 30]), 1, (0,), compute_ns=1, extra=5)
    needed = RESIDENT + 10 + 20 + 5
    assert moments_of(recording, needed).of == {1: (4,)}
    assert moments_of(recording, needed - 1).of == {1: ()}


def test_there_has_to_be_room_for_it_up_to_its_use() -> None:
    """If the second storage is recomputed at 3 for the third, it is on the device while the third is read. At its own
    use, the third has been released."""
    both = recomputable(recomputable(chain([10, 20, 30]), 1, (), compute_ns=1), 2, (1,), compute_ns=1)
    needed = RESIDENT + 20 + 30
    assert moments_of(both, needed).of == {1: (3, 4), 2: (3,)}
    assert moments_of(both, needed - 1).of == {1: (4,), 2: ()}


def recomputed_at(recording: Recording, chosen: tuple[int, ...]) -> dict[int, int]:
    """Maps each lifetime to the first point of the recording at or after its recompute. Before that point it is
    discarded; at that point its own use or the recompute of another lifetime reads it first."""
    missing, found = set(chosen), {}
    for place, point in enumerate(recording.points):
        waiting = [point.lifetime] if point.kind is PointKind.USE else []
        while waiting:
            one = waiting.pop()
            if one in missing and one is not None:
                missing.discard(one)
                found[one] = place
                recompute = recording.lifetimes[one].recompute
                waiting += recompute.inputs if recompute else ()
    return found


@settings(max_examples=examples(150), deadline=None)
@given(recording=any_recomputable_recording(6))
def test_whatever_fits_recomputes_at_these_moments(recording: Recording) -> None:
    """Tries each choice of recomputes under the least budget that it fits with any offloads."""
    candidates = candidates_of(recording)
    for count in range(1, len(candidates) + 1):
        for chosen in itertools.combinations(candidates, count):
            moments = moments_of(recording, least_bytes(with_recomputes(recording, chosen)))
            for one, moment in recomputed_at(recording, chosen).items():
                assert moment in moments.of[one], (chosen, one)
