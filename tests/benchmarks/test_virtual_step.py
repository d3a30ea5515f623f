"""The step of `make bench` that drives a queue by hand: it uses the rates of the profile, and its times add up."""

from __future__ import annotations

from benchmarks.core.transfers import hidden, render_steps
from benchmarks.core.vgg16 import CONVOLUTIONS
from benchmarks.core.virtual_step import FLOP_PER_S, PROFILE, measure_steps
from vdnn.hardware import load_profile


def test_it_reckons_with_the_profile_of_the_titan_x() -> None:
    assert load_profile("titan-x") == PROFILE
    assert PROFILE.flop_per_s["float32"] * PROFILE.compute_efficiency == FLOP_PER_S
    keep = measure_steps(64)[0]
    flop = 64 * sum(convolution.flop for convolution in CONVOLUTIONS)
    # Forward once and backward twice; each convolution is rounded to a nanosecond.
    assert abs(keep.step_ns - 3 * flop / FLOP_PER_S * 1e9) < 3 * len(CONVOLUTIONS)


def test_computing_and_standing_still_is_the_whole_step() -> None:
    for row in measure_steps(16):
        assert row.step_ns == row.compute_ns + row.stall_ns, row.way
        assert row.step_ns <= row.serial_ns, row.way


def test_the_table_says_how_much_of_the_copies_was_hidden() -> None:
    keep, *offloads = measure_steps(64)
    assert hidden(keep) == "-"
    assert [hidden(row) for row in offloads] == ["81%", "83%", "99%"]
    assert "link 12.8 GB/s each way, 22.8 both" in render_steps([keep, *offloads]).replace("\n", " ")
