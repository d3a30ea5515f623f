"""Figures: they show all of a run, labels do not overlap anything, and names are not parsed as formulas or commands."""

from __future__ import annotations

import importlib
import re
import sys
import xml.etree.ElementTree
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from tests.report.steps import BUDGETS, saved_run, tightest
from vdnn.bytesize import format_bytes
from vdnn.errors import LibraryMissingError
from vdnn.report.cell import Cell
from vdnn.report.drawing import NARROW, WIDE, Picture, Shape, plain_number, short_path, unit_for
from vdnn.report.figures import figures_of, write_figures
from vdnn.report.memory_over_step import memory_picture
from vdnn.report.palette import SHADES, looks_of
from vdnn.report.prediction import errors_text, ticks_between, times_of
from vdnn.report.run_folder import Run, read_run
from vdnn.report.trade_off import draw_trade_off

pytest.importorskip("matplotlib", reason="figures need matplotlib: pip install 'vdnn[report]'")

PLAIN = Cell("net", "plain", place="virtual", clock="virtual", device="h100", step_ns=1000, peak_bytes=1 << 30)
HOSTILE = "<script>alert(1)</script> $\\frac{1$ & \"'"


def crowded() -> list[Cell]:
    """A run with peers near each other and far away, and a curve."""
    peers = [
        replace(PLAIN, peer=f"peer-{place}", step_ns=1100 + 7 * place, peak_bytes=(1 << 29) + place)
        for place in range(6)
    ]
    far = [replace(PLAIN, peer=f"far-{place}", step_ns=20_000, peak_bytes=(1 << 28) + place) for place in range(2)]
    own = [
        replace(PLAIN, peer="vdnn-auto", budget=f"{share}%", step_ns=1000 + 2 * (100 - share), peak_bytes=share << 23)
        for share in range(30, 100, 10)
    ]
    return [PLAIN, *peers, *far, *own]


def drawn(picture: Picture, shape: Shape) -> Any:
    """The figure of a picture, laid out."""
    figure = importlib.import_module("matplotlib.figure").Figure(
        figsize=(shape.width, picture.height(shape)), layout="constrained"
    )
    importlib.import_module("matplotlib.backends.backend_agg").FigureCanvasAgg(figure)
    picture.draw(figure, shape)
    return figure


def boxes_of_labels(figure: Any) -> list[tuple[str, Any]]:
    renderer = figure.canvas.get_renderer()
    return [
        (text.get_text(), text.get_window_extent(renderer))
        for axes in figure.axes
        for text in axes.texts
        if text.get_text()
    ]


@pytest.mark.parametrize("shape", [WIDE, NARROW], ids=lambda shape: shape.name)
def test_no_label_lies_on_another_or_outside(tmp_path: Path, shape: Shape) -> None:
    run = Run(tmp_path, tuple(crowded()), ())
    (picture,) = figures_of(run).trade_offs
    figure = drawn(picture, shape)
    figure.draw_without_rendering()
    labels = boxes_of_labels(figure)
    assert bool(labels) is not shape.is_narrow, "a narrow picture names its points below"
    for (one, box), (other, other_box) in combinations(labels, 2):
        assert not box.overlaps(other_box), f"{one!r} lies on {other!r}"
    for text, box in labels:
        assert figure.bbox.contains(box.x0, box.y0), text
        assert figure.bbox.contains(box.x1, box.y1), text


def test_the_wide_trade_off_names_every_peer(tmp_path: Path) -> None:
    cells = crowded()
    (picture,) = figures_of(Run(tmp_path, tuple(cells), ())).trade_offs
    said = " ".join(text for text, _ in boxes_of_labels(drawn(picture, WIDE)))
    assert all(cell.peer in said for cell in cells)
    assert "far-0, +1900 %" in said, "what is beyond the edge has its number"


@pytest.mark.slow
def test_a_run_has_a_png_and_an_svg_of_each_picture(tmp_path: Path) -> None:
    saved_run(tmp_path / "run")
    paths = write_figures(tmp_path / "run", tmp_path / "figures")
    # A trade-off, and the memory and the timeline of each step. Two predicted cells are too few for a scatter.
    assert len(paths) == 2 * (1 + 2 * len(BUDGETS))
    for path in paths:
        if path.suffix == ".png":
            assert path.read_bytes().startswith(b"\x89PNG")
        else:
            xml.etree.ElementTree.parse(path)


def test_peers_at_one_point_have_one_label(tmp_path: Path) -> None:
    twins = [replace(PLAIN, peer=name) for name in ("checkpoint", "dtr")]
    (picture,) = figures_of(Run(tmp_path, (*twins, *crowded()), ())).trade_offs
    assert "plain, checkpoint, dtr" in [text for text, _ in boxes_of_labels(drawn(picture, WIDE))]


def test_a_budget_below_the_least_is_no_line_under_the_picture(tmp_path: Path) -> None:
    lost = replace(PLAIN, status="failed", said="it stopped", step_ns=None, peak_bytes=None)
    cells = (*crowded(), replace(lost, peer="vdnn-auto", budget="=far-0"), replace(lost, peer="lost"))
    draw_trade_off(cells, tmp_path / "a.svg")
    svg = (tmp_path / "a.svg").read_text()
    assert "Not drawn: failed: lost<" in svg
    assert "=far-0" not in svg


@pytest.mark.parametrize(
    ("number", "text"),
    [(5490.0, "5,490"), (100, "100"), (13.94, "13.9"), (4.07, "4.07"), (2, "2"), (0.0012, "0.0012"), (0, "0")],
)
def test_a_tick_is_a_plain_number(number: float, text: str) -> None:
    assert plain_number(number) == text


@pytest.mark.parametrize(("low", "high"), [(3512, 6383), (0.9, 1.7), (1, 1e7), (3.1e6, 5.8e6)])
def test_an_axis_has_at_least_two_round_ticks(low: float, high: float) -> None:
    found = ticks_between(low, high)
    assert len(found) >= 2
    assert all(low <= tick <= high and float(plain_number(tick).replace(",", "")) == tick for tick in found)


def test_a_run_of_few_cells_leads_with_memory_over_the_step(tmp_path: Path) -> None:
    step = tightest()
    found = figures_of(Run(tmp_path, (), (step,)))
    (picture,) = found.leading
    assert (found.trade_offs, found.prediction) == ((), None)
    said = [text.get_text() for text in drawn(picture, WIDE).axes[0].get_legend().get_texts()]
    assert step.recording is not None
    assert said[0] == f"everything kept: peak {format_bytes(step.recording.peak_bytes)}"
    assert [one.split(":")[0].split()[0] for one in said] == ["everything", "with", "budget"]


def test_the_same_run_makes_the_same_file(tmp_path: Path) -> None:
    draw_trade_off(crowded(), tmp_path / "a.svg")
    first = (tmp_path / "a.svg").read_bytes()
    draw_trade_off(crowded(), tmp_path / "a.svg")
    assert (tmp_path / "a.svg").read_bytes() == first


def test_an_inline_picture_has_no_colour_of_its_own_and_no_address(tmp_path: Path) -> None:
    (picture,) = figures_of(Run(tmp_path, tuple(crowded()), ())).trade_offs
    svg = picture.inline(WIDE)
    assert svg.startswith("<svg")
    assert "http" not in svg
    assert not {shade.light for shade in SHADES} & set(re.findall("#[0-9a-f]{6}", svg))
    assert "var(--green)" in svg
    assert " id=" not in re.sub(r"<(clipPath|path|pattern)[^>]*>", "", svg)


@pytest.mark.slow
def test_pictures_in_one_page_share_no_names(tmp_path: Path) -> None:
    run = saved_run(tmp_path)
    names: list[str] = []
    for picture in figures_of(run).all:
        for shape in (WIDE, NARROW):
            names += set(re.findall(r' id="([^"]*)"', picture.inline(shape)))
    assert len(names) == len(set(names))


@pytest.mark.parametrize(("nbytes", "unit"), [(3 << 30, "GiB"), (1 << 30, "GiB"), (5 << 20, "MiB"), (7, "KiB")])
def test_an_axis_has_the_largest_unit_that_fits(nbytes: int, unit: str) -> None:
    assert unit_for(nbytes)[0] == unit


def test_a_small_step_has_its_memory_in_mib(tmp_path: Path) -> None:
    run = saved_run(tmp_path)
    for step in run.steps:
        assert step.recording is not None
        kept = drawn(memory_picture(step, "network", "network"), WIDE).axes[0]
        assert kept.get_ylabel() == "on the device (MiB)"
        assert kept.get_ylim()[1] == pytest.approx(1.08 * step.recording.peak_bytes / 2**20)


def test_peaks_without_plain_have_a_unit_of_their_own(tmp_path: Path) -> None:
    cells = [replace(cell, peak_bytes=(cell.peak_bytes or 0) >> 8) for cell in crowded()[1:]]
    draw_trade_off(cells, tmp_path / "a.svg")
    assert "peak memory (MiB)" in (tmp_path / "a.svg").read_text()


def test_a_hostile_name_is_text(tmp_path: Path) -> None:
    cells = [replace(cell, workload=HOSTILE, device=HOSTILE, peer=cell.peer + HOSTILE) for cell in crowded()[1:]]
    draw_trade_off(cells, tmp_path / "a.svg")
    assert "<script" not in (tmp_path / "a.svg").read_text()
    assert "&lt;script&gt;" in (tmp_path / "a.svg").read_text()
    draw_trade_off(cells, tmp_path / "a.png", narrow=True)


def test_what_cannot_be_drawn_is_left_out_with_its_reason(tmp_path: Path) -> None:
    step = tightest()
    replace(step, name="bare", measured=None, predicted=None).save(tmp_path)
    replace(step, name="timeline only", recording=None, plan=None).save(tmp_path)
    found = figures_of(read_run(tmp_path))
    assert [len(pictures) for pictures in found.steps.values()] == [1, 1]
    assert found.left_out == (
        "Prediction against measurement: no cell was both predicted and measured.",
        "The timeline of the step bare: it has neither measured.json nor predicted.json.",
        "Memory over the step timeline only: it has no recording.json.",
    )
    for picture in found.all:
        assert picture.inline(NARROW)


def test_an_empty_run_says_what_all_is_missing(tmp_path: Path) -> None:
    found = figures_of(Run(tmp_path, (), ()))
    assert found.all == ()
    assert len(found.left_out) == 3


def test_a_step_that_went_otherwise_than_predicted_is_drawn_twice(tmp_path: Path) -> None:
    step = tightest()
    assert step.predicted is not None
    other = replace(step, predicted=replace(step.predicted, step_ns=2 * step.predicted.step_ns))
    heights = []
    for one in (step, other):
        one.save(tmp_path)
        (_, timeline) = figures_of(read_run(tmp_path)).steps[one.name]
        heights.append(timeline.height(WIDE))
        assert len(drawn(timeline, WIDE).axes) == len(heights)
    assert heights[1] > heights[0]


def test_a_peer_looks_the_same_whatever_the_order() -> None:
    cells = crowded()
    assert looks_of(cells) == looks_of(list(reversed(cells)))
    assert len(set(looks_of(cells).values())) == len(looks_of(cells))


def test_errors_of_predictions_are_said() -> None:
    exact = replace(PLAIN, predicted_step_ns=1000)
    off = replace(PLAIN, budget="50%", predicted_step_ns=800)
    assert errors_text(times_of([exact]), "times") == "times: exactly as predicted"
    assert errors_text(times_of([exact, off]), "times") == (
        "times: median error 12.50 % of 2, largest error +25.00 % (net 50%)"
    )


def test_without_matplotlib_one_sentence_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    saved_run(tmp_path / "run")
    with pytest.raises(LibraryMissingError, match=r"run pip install 'vdnn\[report\]', or pip install matplotlib\."):
        write_figures(tmp_path / "run", tmp_path / "figures")
    assert not (tmp_path / "figures").exists()


@pytest.mark.parametrize(
    ("path", "short"),
    [
        ("M 10 20 L 10 20 L 15 20 L 18 20 L 18 25 z", "M10 20h8v5z"),
        ("M 0.04 0 L 1.26 2.5", "M0 0l1.3 2.5"),
        ("M 0 0 L 5 0 L 3 0", "M0 0h5h-2"),
        ("M 0 0 C 1 1 2 2 3 3", "M 0 0 C 1 1 2 2 3 3"),
        ("M 0 0 L 1 0 z M 5 5 L 5 6", "M0 0h1zM5 5v1"),
    ],
)
def test_a_path_is_written_short_and_ends_where_it_ended(path: str, short: str) -> None:
    assert short_path(path) == short
