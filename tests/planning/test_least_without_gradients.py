"""The least memory of a step whose gradients leave as they are made."""

from __future__ import annotations

from vdnn.planning.least_memory import least_bytes, least_bytes_without_gradients
from vdnn.step.recording import Lifetime, Point, PointKind, Recording

_RESIDENT = 100


def _recording(gradient_bytes: int, *, outlives_the_last_use: bool) -> Recording:
    """Two saves of 10 bytes. The backward of the second makes a gradient, and that of the first takes 50 bytes more
    while it runs."""
    here = gradient_bytes if outlives_the_last_use else 0
    points = (
        Point(PointKind.SAVE, 0, None, 1, _RESIDENT + 10, _RESIDENT + 10),
        Point(PointKind.SAVE, 1, None, 1, _RESIDENT + 20, _RESIDENT + 20),
        Point(PointKind.USE, 1, None, 1, _RESIDENT + 20, _RESIDENT + 20),
        Point(PointKind.USE, 0, None, 1, _RESIDENT + 10 + here, _RESIDENT + 20 + gradient_bytes),
        Point(PointKind.END, None, None, 1, _RESIDENT + here, _RESIDENT + 10 + here + 50),
    )
    lifetimes = (
        Lifetime(10, (0,), (3,), (4,), 1, 4, 4),
        Lifetime(10, (1,), (2,), (3,), 2, 3, 3),
    )
    return Recording("simulation", "a device", 1 << 20, "", "virtual", _RESIDENT, 0, points, lifetimes)


def test_a_gradient_that_is_there_at_the_peak_counts_no_more() -> None:
    recording = _recording(40, outlives_the_last_use=True)
    assert least_bytes(recording) == _RESIDENT + 10 + 40 + 50
    assert least_bytes_without_gradients(recording) == _RESIDENT + 10 + 50


def test_memory_that_is_freed_before_the_last_use_is_no_gradient() -> None:
    recording = _recording(40, outlives_the_last_use=False)
    assert least_bytes_without_gradients(recording) == least_bytes(recording)
