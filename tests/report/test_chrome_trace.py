"""The trace: every viewer can read it, and its slices add up to the timeline that it shows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.planning.recordings import chain
from tests.report.steps import parts, saved_run, tightest
from tests.report.trace_parser import Process, TraceError, parse
from vdnn.report.chrome_trace import RELEASE_STALL, RELOAD_STALL, trace_of, write_trace
from vdnn.report.run_folder import read_run
from vdnn.step.saved_step import SavedStep
from vdnn.step.timeline import Copy, Mark, Timeline, Track


def traced(*steps: SavedStep) -> dict[int, Process]:
    return parse(json.dumps(trace_of(steps)))


def stalled() -> SavedStep:
    """A step made by hand: it waits for both kinds of copies at one point, and one copy is in flight when the step
    ends."""
    timeline = Timeline(
        "measured",
        "device",
        100,
        (
            Mark(0, 10, 10, 0, 0, 50, 60),
            Mark(1, 30, 55, 5, 20, 40, 70),
            Mark(2, 80, 80, 0, 0, 20, 45),
        ),
        (
            Copy(Track.TO_HOST, 0, 7, 10, 35),
            Copy(Track.TO_HOST, 1, 8, 30, 55),
            Copy(Track.TO_DEVICE, 0, 7, 30, 50),
        ),
    )
    return SavedStep("by hand", recording=chain([7]), measured=timeline)


def test_the_sums_of_a_real_step_are_those_of_its_timeline() -> None:
    step = tightest()
    _, _, timeline = parts(step)
    predicted, measured = traced(step).values()
    assert predicted.name == "tightest: predicted (virtual time)"
    assert measured.name == "tightest: run in virtual time"
    compute = measured.row("compute")
    assert compute.total_ns() == timeline.step_ns
    assert compute.total_ns(RELOAD_STALL) == timeline.reload_stall_ns
    assert compute.total_ns(RELEASE_STALL) == timeline.release_stall_ns
    for track in Track:
        row = measured.row(track.value)
        assert row.total_ns() == timeline.busy_ns(track)
        assert sum(about["bytes"] for *_, about in row.slices) == timeline.copied_bytes(track)
    assert max(count for _, count in measured.counted) == timeline.peak_bytes
    assert measured.counted[-1] == (timeline.marks[-1].end_ns, timeline.marks[-1].allocated_bytes)


def test_stalls_are_slices_of_their_kind_between_the_computing() -> None:
    (process,) = traced(stalled()).values()
    slices = process.row("compute").slices
    assert [(begin, end) for begin, end, *_ in slices] == [(0, 10), (10, 30), (30, 50), (50, 55), (55, 80), (80, 100)]
    assert [name for _, _, name, _ in slices[2:4]] == [RELOAD_STALL, RELEASE_STALL]


def test_copies_that_were_measured_at_one_time_have_rows_of_their_own() -> None:
    (process,) = traced(stalled()).values()
    assert [row.name for row in process.rows.values()] == ["compute", "to host", "to host (2)", "to device"]


def test_spans_are_named_by_what_was_saved_and_by_what_used_it() -> None:
    step = tightest()
    recording, _, _ = parts(step)
    measured = traced(step)[2]
    names = {name for _, _, name, _ in measured.row("compute").slices}
    assert "Convolution in 1" in names
    assert any(name.startswith("ConvolutionBackward0 with ") for name in names)
    copied = {about["storage"] for *_, about in measured.row("to host").slices}
    assert all(0 <= storage < len(recording.lifetimes) for storage in copied)


def test_a_timeline_alone_is_enough() -> None:
    recording, _, timeline = parts(tightest())
    (process,) = traced(SavedStep("bare", measured=timeline)).values()
    assert process.row("compute").total_ns() == timeline.step_ns
    assert traced(SavedStep("none", recording=recording)) == {}


def test_a_step_with_a_plan_and_no_recording_is_numbered() -> None:
    (process,) = traced(replace(tightest(), recording=None, predicted=None)).values()
    assert any("storage" in name for _, _, name, _ in process.row("to host").slices)


def test_a_run_has_a_process_for_each_timeline(tmp_path: Path) -> None:
    saved_run(tmp_path)
    run = read_run(tmp_path)
    assert write_trace(run, tmp_path / "trace.json") == 2 * len(run.steps)
    assert len(parse((tmp_path / "trace.json").read_text())) == 2 * len(run.steps)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"ph": "X", "name": "a", "pid": 1, "tid": 1, "ts": 0, "dur": -1, "args": {}}, "goes back in time"),
        ({"ph": "X", "name": "a", "pid": 1, "tid": 1, "ts": 0.01, "dur": 5, "args": {}}, "overlap"),
        ({"ph": "X", "name": "a", "pid": 1, "tid": 9, "ts": 0, "dur": 1, "args": {}}, "row 9 of by hand.* has no name"),
        ({"ph": "X", "name": "a", "pid": 2, "tid": 1, "ts": 0, "dur": 1, "args": {}}, "a process has no name"),
        ({"ph": "X", "name": "a", "tid": 1, "ts": 0, "dur": 1, "args": {}}, "an event has no pid"),
        ({"ph": "B", "name": "a", "pid": 1, "tid": 1, "ts": 0}, "a kind of event that is not known: B"),
    ],
)
def test_the_parser_finds_what_breaks_the_rules(change: dict[str, object], said: str) -> None:
    trace = trace_of([stalled()])
    trace["traceEvents"].append(change)
    with pytest.raises(TraceError, match=said):
        parse(json.dumps(trace))
