"""Among several plans, the first that fits is chosen, or else the one with the lowest peak."""

from __future__ import annotations

from tests.planning.recordings import chain
from vdnn.planning.gaps import gaps_of, planned_lifetimes
from vdnn.planning.policies.under_budget import Lifetimes, first_that_fits, peak_bytes
from vdnn.step.plan import Absence
from vdnn.step.recording import Recording


def without(recording: Recording, *away: int) -> Lifetimes:
    return planned_lifetimes(
        recording, {gap: Absence(gap.release_point) for gap in gaps_of(recording) if gap.lifetime in away}
    )


def test_the_first_that_fits_is_taken() -> None:
    recording = chain([10, 20, 30, 40])
    kept, less, least = without(recording), without(recording, 0), without(recording, 0, 1)
    assert first_that_fits(recording, iter([kept, less, least]), recording.peak_bytes - 5) is less
    assert first_that_fits(recording, iter([kept, less, least]), recording.peak_bytes) is kept


def test_else_the_closest_and_of_equal_ones_the_first() -> None:
    recording = chain([10, 20, 30, 40])
    candidates = [
        without(recording),
        without(recording, 0),
        without(recording, 1),
        without(recording, 1),
        without(recording),
    ]
    assert first_that_fits(recording, candidates, 1) is candidates[2]
    assert peak_bytes(recording, candidates[2]) == recording.peak_bytes - 20
