"""Release points when copies are complete or room is needed; reload points when wanted or when there is room."""

from __future__ import annotations

from tests.planning.policies.steps import EVEN, with_lifetimes
from tests.planning.recordings import chain
from vdnn.planning.gaps import Gap, gaps_of
from vdnn.planning.policies.step_clock import StepClock
from vdnn.planning.policies.swap_schedule import release_when_copied, reload_within_room
from vdnn.step.plan import Absence
from vdnn.step.recording import Recording

# A chain of four has saves at 0 to 3 and uses at 4 (of 3) to 7 (of 0). Point p is reached at (p + 1) * 1000 ns.


def released(recording: Recording, budget_bytes: int | None = None) -> dict[int, int]:
    """Release points by lifetime."""
    points = release_when_copied(recording, StepClock(recording, EVEN), gaps_of(recording), budget_bytes)
    return {gap.lifetime: point for gap, point in points.items()}


def test_copies_out_are_made_one_by_one() -> None:
    # The copies are complete at 2800 and at 4600, because the second waits for the first.
    assert released(chain([1800, 1800, 10, 10])) == {0: 2, 1: 4, 2: 4}


def test_what_is_used_before_its_copy_is_done_stays() -> None:
    assert released(chain([10, 5000, 10, 10])) == {0: 1}


def test_room_makes_the_first_copied_leave_early() -> None:
    recording = chain([1800, 1800, 10, 10])
    assert released(recording, recording.points[1].peak_bytes - 1) == {0: 0, 1: 4, 2: 4}


def test_nobody_leaves_early_who_would_not_be_away_then() -> None:
    # The first is held until its use, so only the second makes room.
    recording = with_lifetimes(chain([1800, 1800, 10, 10]), {0: {"free_point": 6}})
    assert released(recording, recording.points[2].peak_bytes - 1)[1] == 1


def reloaded(recording: Recording, wanted: dict[int, int], budget_bytes: int | None) -> dict[int, Absence]:
    """Reload points of all gaps. Each gap's storage is released as early as possible."""
    gaps = gaps_of(recording)
    wishes: dict[Gap, int] = {gap: wanted[gap.lifetime] for gap in gaps if gap.lifetime in wanted}
    absences = reload_within_room(recording, {gap: gap.release_point for gap in gaps}, wishes, budget_bytes)
    return {gap.lifetime: absence for gap, absence in absences.items()}


def test_it_comes_back_when_it_is_wanted_but_not_before_it_has_gone() -> None:
    absences = reloaded(chain([10, 10, 10, 10]), {0: 5, 1: 0, 2: 5, 3: 4}, None)
    assert absences == {0: Absence(0, 5), 1: Absence(1, 2), 2: Absence(2), 3: Absence(3)}


def test_it_comes_back_when_there_is_room_and_what_is_used_first_goes_first() -> None:
    recording = chain([30, 10, 10, 10])
    # There are 30 bytes of room: enough for two of 10 beside the storage in use, and not for the 30.
    absences = reloaded(recording, {0: 0, 1: 0, 2: 0, 3: 0}, recording.peak_bytes - 30)
    assert absences == {0: Absence(0), 1: Absence(1, 2), 2: Absence(2, 3), 3: Absence(3)}
