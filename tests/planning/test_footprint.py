"""The memory of a plan in every interval equals that of a step followed by hand."""

from __future__ import annotations

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from tests.planning.recordings import RESIDENT, any_recording, chain
from vdnn.planning.footprint import absent_intervals, interval_bytes, offload_everything
from vdnn.planning.gaps import gaps_of
from vdnn.step.plan import Absence, Action, PlannedLifetime
from vdnn.step.recording import Lifetime, Recording


def keep(recording: Recording) -> list[PlannedLifetime]:
    return [PlannedLifetime(one.nbytes, Action.KEEP) for one in recording.lifetimes]


def test_keeping_everything_is_what_was_recorded() -> None:
    recording = chain([10, 20, 30])
    assert interval_bytes(recording, keep(recording)) == [point.peak_bytes for point in recording.points]


def test_a_storage_is_away_from_after_its_release_to_its_reload() -> None:
    recording = chain([10, 20, 30])  # saves at 0, 1, 2; uses at 3 (of 2), 4 (of 1), 5 (of 0); end at 6
    planned = keep(recording)
    absence = Absence(release_point=1, reload_point=3)
    planned[0] = PlannedLifetime(10, Action.OFFLOAD, (absence,))
    assert list(absent_intervals(recording.lifetimes[0], absence)) == [2, 3]
    kept = interval_bytes(recording, keep(recording))
    moved = interval_bytes(recording, planned)
    assert [before - after for before, after in zip(kept, moved, strict=True)] == [0, 0, 10, 10, 0, 0, 0]


def test_without_a_reload_point_it_is_away_until_its_use() -> None:
    assert list(absent_intervals(chain([10, 20, 30]).lifetimes[0], Absence(0))) == [1, 2, 3, 4, 5]


def test_a_storage_that_somebody_else_holds_is_freed_only_after_them() -> None:
    lifetime = chain([10, 20, 30]).lifetimes[0]
    held = dataclasses.replace(lifetime, free_point=3)
    assert list(absent_intervals(held, Absence(0))) == [4, 5]


def test_between_two_uses_it_is_away_but_for_what_reads_it() -> None:
    used_twice = Lifetime(10, saves=(0,), uses=(3, 8), read=(4, 9), copy_point=0, free_point=0, end_point=9)
    assert list(absent_intervals(used_twice, Absence(0))) == [1, 2, 3]
    # The operation with the use at 3 reads it in the interval before point 4, wherever it is released.
    assert list(absent_intervals(used_twice, Absence(3))) == [5, 6, 7, 8]
    assert list(absent_intervals(used_twice, Absence(5))) == [6, 7, 8]
    assert list(absent_intervals(used_twice, Absence(3, 6))) == [5, 6]
    # An operation with further uses at 4 and 5 runs after those.
    asked_first = dataclasses.replace(used_twice, read=(6, 9))
    assert list(absent_intervals(asked_first, Absence(3))) == [7, 8]


def test_offloading_everything_leaves_one_storage_at_a_time() -> None:
    recording = chain([10, 10, 10, 10])
    # Before each save only the storage to be saved is on the device, before the first use none is, and after each use
    # the one that it reloaded.
    moved = interval_bytes(recording, offload_everything(recording))
    assert moved == [RESIDENT + held for held in (10, 10, 10, 10, 0, 10, 10, 10, 10)]


def followed_by_hand(recording: Recording, planned: list[PlannedLifetime]) -> list[int]:
    """The footprint, computed point by point from the storages that are on the device in the interval before it."""
    peaks = []
    for place, point in enumerate(recording.points):
        absent = 0
        for lifetime, one in zip(recording.lifetimes, planned, strict=True):
            for absence in one.absences:
                gone = place > absence.release_point and place > lifetime.free_point
                gone = gone and not any(use <= absence.release_point and use + 1 == place for use in lifetime.uses)
                uses = [use for use in lifetime.uses if use > absence.release_point]
                back = min([*uses[:1], *([] if absence.reload_point is None else [absence.reload_point])], default=None)
                is_back = back is not None and place > back
                if gone and not is_back and place <= lifetime.end_point:
                    absent += lifetime.nbytes
        peaks.append(point.peak_bytes - absent)
    return peaks


@given(any_recording(), st.data())
def test_the_sum_of_intervals_is_the_step_followed_by_hand(recording: Recording, data: st.DataObject) -> None:
    planned = []
    end = len(recording.points) - 1
    for lifetime in recording.lifetimes:
        if data.draw(st.booleans()) or lifetime.copy_point >= end:
            planned.append(PlannedLifetime(lifetime.nbytes, Action.KEEP))
            continue
        release = data.draw(st.integers(lifetime.copy_point, end - 1))
        reload = data.draw(st.none() | st.integers(release + 1, end))
        planned.append(PlannedLifetime(lifetime.nbytes, Action.OFFLOAD, (Absence(release, reload),)))
    assert interval_bytes(recording, planned) == followed_by_hand(recording, planned)


@given(any_recording())
def test_gaps_are_the_widest_absences(recording: Recording) -> None:
    """offload_everything() uses exactly these gaps, in the order of the copies."""
    widest = [
        (lifetime.copy_point, index, number, absence.release_point, list(absent_intervals(lifetime, absence)))
        for index, (lifetime, planned) in enumerate(
            zip(recording.lifetimes, offload_everything(recording), strict=True)
        )
        for number, absence in enumerate(planned.absences)
    ]
    assert [
        (
            recording.lifetimes[gap.lifetime].copy_point,
            gap.lifetime,
            gap.number,
            gap.release_point,
            list(range(gap.first, gap.last + 1)),
        )
        for gap in gaps_of(recording)
    ] == sorted(widest)
