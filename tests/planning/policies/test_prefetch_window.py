"""vDNN's search for storages to prefetch: one layer at a time, up to the first convolution that needs no reload."""

from __future__ import annotations

from tests.planning.policies.steps import CONVOLUTION, with_lifetimes, with_operations
from tests.planning.recordings import chain
from vdnn.planning.gaps import Gap, gaps_of
from vdnn.planning.policies.backward_operations import operations_of
from vdnn.planning.policies.layerwise import prefetch_points
from vdnn.step.recording import Recording


def points(recording: Recording, *away: int) -> dict[int, int]:
    """Reload points by lifetime, if these lifetimes are released as early as possible."""
    released: dict[Gap, int] = {gap: gap.release_point for gap in gaps_of(recording) if gap.lifetime in away}
    return {gap.lifetime: point for gap, point in prefetch_points(operations_of(recording), released).items()}


def test_an_operation_brings_back_for_one_other() -> None:
    assert points(chain([10] * 5), 0, 1, 2) == {2: 5, 1: 6, 0: 7}


def test_an_operation_that_uses_two_gets_both() -> None:
    # The operation with the uses at 6 and 7 runs until 8.
    recording = with_lifetimes(chain([10] * 5), {3: {"read": (8,)}, 2: {"read": (8,)}})
    assert [operation.uses for operation in operations_of(recording)] == [(5,), (6, 7), (8,), (9,)]
    assert points(recording, 1, 2, 3) == {3: 5, 2: 5, 1: 7}


def test_the_search_goes_on_across_layers_that_need_nothing() -> None:
    assert points(chain([10] * 5), 0) == {0: 5}


def test_a_convolution_that_needs_nothing_ends_it() -> None:
    recording = with_operations(chain([10] * 5), ["", "", CONVOLUTION, "", ""])
    assert points(recording, 0) == {0: 7}


def test_a_convolution_that_was_served_ends_it_too() -> None:
    recording = with_operations(chain([10] * 5), ["", "", CONVOLUTION, "", ""])
    # The first operation finds the convolution; the second stops at it; the convolution searches on.
    assert points(recording, 0, 2) == {2: 5, 0: 7}


def test_what_the_first_operation_needs_nobody_brings() -> None:
    assert points(chain([10] * 3), 0, 2) == {0: 3}


def test_nothing_comes_back_before_it_has_gone() -> None:
    recording = chain([10] * 5)
    (gap,) = [one for one in gaps_of(recording) if one.lifetime == 0]
    assert prefetch_points(operations_of(recording), {gap: 6}) == {gap: 7}
