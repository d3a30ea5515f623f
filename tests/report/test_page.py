"""The text of the page: it contains all of the run, escaped, and nothing that makes a request."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.report.steps import saved_run, tightest
from vdnn.report.cell import Cell
from vdnn.report.page import SCRIPT, page_of, script_hash, write_html
from vdnn.report.run_folder import Run, append_cells, read_run
from vdnn.step.recording import Recording
from vdnn.step.saved_step import SavedStep

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>\"' $\\frac"


class Reader(HTMLParser):
    """Collects the tags, with their attributes, and the text outside of scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.texts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag in ("script", "style"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if self.open and self.open[-1] == tag:
            self.open.pop()

    def handle_data(self, data: str) -> None:
        if not self.open:
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.texts)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    return page_of(saved_run(tmp_path_factory.mktemp("run")))


def hostile_step() -> SavedStep:
    """A step in which every name is an injection attempt."""
    step = tightest()
    recording = step.recording
    assert isinstance(recording, Recording)
    points = tuple(
        point if point.key is None else replace(point, key=replace(point.key, module=HOSTILE, producer=HOSTILE))
        for point in recording.points
    )
    return replace(step, recording=replace(recording, points=points, device_name=HOSTILE))


def test_the_page_needs_nothing_else(page: str) -> None:
    assert not re.search(r"https?:", page)
    reader = Reader(page)
    loading = {"src", "srcset", "data", "action", "poster"}
    for tag, attributes in reader.tags:
        assert not loading & set(attributes), tag
        if "href" in attributes:
            assert (attributes["href"] or "").startswith(("#", "data:,")), tag
        assert not any(name.startswith("on") for name in attributes), tag
    assert [tag for tag, _ in reader.tags].count("script") == 1


def test_only_its_own_script_may_run(page: str) -> None:
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    assert f"script-src '{script_hash()}'" in policy
    assert "default-src 'none'" in policy
    assert f"<script>{SCRIPT}</script>" in page


def test_the_page_says_what_the_run_says(page: str) -> None:
    text = Reader(page).text
    for said in (
        "virtual titan-x",
        "vdnn-auto",
        "plain",
        "80 %",
        "50 %",
        "network, batch 16",
        "of the memory of plain PyTorch",
    ):
        assert said in text
    assert "recomputed by" in text, "why a storage has its action"
    assert "next best: " in text, "what the plan's reasons say"
    assert "3 virtual: computed from the figures of a card that was not present" in text


@pytest.mark.slow
def test_hostile_names_stay_text(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    hostile_step().save(tmp_path)
    cell = Cell(HOSTILE, "plain", place="virtual", clock="virtual", device=HOSTILE, step_ns=9, peak_bytes=9)
    own = replace(cell, peer="vdnn-auto", budget=HOSTILE, said=HOSTILE, versions={HOSTILE: HOSTILE}, commit=HOSTILE)
    append_cells(tmp_path, [cell, own, replace(own, peer=HOSTILE), replace(cell, workload="another")])
    page = page_of(read_run(tmp_path))
    reader = Reader(page)
    assert [tag for tag, _ in reader.tags].count("script") == 1
    assert "img" not in {tag for tag, _ in reader.tags}
    assert not any(name.startswith("on") for _, attributes in reader.tags for name in attributes)
    assert "alert(1)" in reader.text, "it is shown"
    assert HOSTILE in unescape(page)


def test_every_heading_of_a_table_is_a_button_and_every_row_has_a_value_to_sort_by(page: str) -> None:
    tags = Reader(page).tags
    heads = [attributes for tag, attributes in tags if tag == "th"]
    assert heads
    assert {attributes.get("aria-sort") for attributes in heads} == {"none"}
    assert all("data-value" in attributes for tag, attributes in tags if tag == "td")
    assert len(re.findall(r"<th [^>]*><button type=\"button\">", page)) == len(heads)


def test_figures_have_a_text_for_who_cannot_see_them(page: str) -> None:
    pytest.importorskip("matplotlib")
    figures = [attributes for tag, attributes in Reader(page).tags if tag == "svg"]
    assert figures
    assert all(attributes.get("role") == "img" and attributes.get("aria-label") for attributes in figures)


def test_an_empty_run_is_a_page_that_says_so() -> None:
    text = Reader(page_of(Run(Path("nothing"), (), (), ("cells.jsonl: line 1, the last, was cut off",)))).text
    assert "This run has no measured or predicted step of vdnn." in text
    assert "the run has no cells" in text
    assert "was cut off" in text


def test_without_matplotlib_the_page_has_its_tables_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = saved_run(tmp_path / "run")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    write_html(run, tmp_path / "page.html")
    reader = Reader((tmp_path / "page.html").read_text())
    assert "svg" not in {tag for tag, _ in reader.tags}
    assert "pip install 'vdnn[report]'" in reader.text
    assert "vdnn-auto" in reader.text


def test_the_room_needs_neither_torch_nor_matplotlib() -> None:
    code = (
        "import sys; sys.modules['torch'] = sys.modules['matplotlib'] = None; import vdnn.report; "
        "print(len(vdnn.report.__all__))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_of_very_many_steps_the_page_draws_some_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    run = saved_run(tmp_path)
    monkeypatch.setattr("vdnn.report.page._DRAWN_STEPS", 1)
    page = page_of(run)
    assert "This page has figures for 1 of 2 steps" in Reader(page).text
    assert page.count("Timeline of one step") == 1
    opened = re.findall(r"<details [^>]* open><summary>([^<]*)", page)
    assert len(opened) == 1, "one for the workload: the one that the headline names"
    assert page.index(opened[0]) < page.index("Timeline of one step")


def test_a_column_that_no_row_needs_is_left_out(tmp_path: Path) -> None:
    plain = Cell("net", "plain", place="virtual", clock="virtual", device="h100", step_ns=1000, peak_bytes=1000)
    append_cells(tmp_path, [plain, replace(plain, peer="other", status="failed", said="why", step_ns=None)])
    write_html(tmp_path, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    headings = re.findall(r'<button type="button">([^<]*)</button>', text)
    assert headings == ["workload", "peer", "of plain", "more time", "peak", "step", "remark"]
    assert "All rows are of virtual h100." in text
    assert "failed: why" in text
