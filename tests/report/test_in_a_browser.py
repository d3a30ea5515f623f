"""The page in a real browser, as wide as a phone and as a desktop: it fits, sorts and filters, and makes no
requests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.report.browser import Seen, find_browser, look_at
from tests.report.steps import saved_run
from tests.report.test_page import HOSTILE, hostile_step
from vdnn.report.cell import Cell
from vdnn.report.page import write_html
from vdnn.report.run_folder import append_cells

pytest.importorskip("matplotlib", reason="figures need matplotlib: pip install 'vdnn[report]'")
BROWSER = find_browser()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="no browser: apt-get install chromium"),
]
WIDTHS = (400, 1300, 1400)

LOOK = r"""
  for (const one of doc.querySelectorAll("details")) one.open = true;
  const shown = one => one.checkVisibility();
  const sizes = [], overlaps = [], outside = [];
  let least = 1e9, leastText = "";
  const note = (pixels, text) => { if (pixels < least) { least = pixels; leastText = text; } };
  for (const svg of doc.querySelectorAll("figure svg")) {
    if (!shown(svg)) continue;
    const box = svg.getBoundingClientRect();
    sizes.push([box.width, box.height]);
    const scale = box.width / svg.viewBox.baseVal.width;
    const texts = [];
    for (const text of svg.querySelectorAll("text")) {
      if (!text.textContent.trim()) continue;
      note(parseFloat(win.getComputedStyle(text).fontSize) * scale, text.textContent);
      const at = text.getBoundingClientRect();
      if (at.left < box.left - 2 || at.right > box.right + 2) outside.push(text.textContent);
      // A line's box is higher than its letters: what is left is where there is ink.
      const slack = at.width > at.height ? [1, at.height * 0.25] : [at.width * 0.25, 1];
      texts.push({ text: text.textContent, left: at.left + slack[0], right: at.right - slack[0],
                   top: at.top + slack[1], bottom: at.bottom - slack[1] });
    }
    for (let i = 0; i < texts.length; i++)
      for (let j = i + 1; j < texts.length; j++) {
        const a = texts[i], b = texts[j];
        if (a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom)
          overlaps.push([a.text, b.text]);
      }
  }
  for (const one of doc.querySelectorAll("main *")) {
    const own = Array.from(one.childNodes).some(node => node.nodeType === 3 && node.textContent.trim());
    if (own && shown(one) && !one.closest("svg")) note(parseFloat(win.getComputedStyle(one).fontSize), one.textContent);
  }
  const hidden = Array.from(doc.querySelectorAll("figure svg")).filter(svg => !shown(svg)).length;
  const root = doc.scrollingElement;
  win.scrollTo(10000, 0);
  const table = doc.querySelector("h2 ~ .box table");
  const head = Array.from(table.tHead.rows[0].cells).find(cell => cell.textContent === "peak");
  const column = () => Array.from(table.tBodies[0].rows).map(row => row.cells[head.cellIndex].dataset.value);
  const sorting = { before: column() };
  const button = head.querySelector("button");
  button.focus();
  sorting.focused = doc.activeElement === button && button.tabIndex === 0;
  button.click();
  sorting.up = column(); sorting.upSaid = head.getAttribute("aria-sort");
  button.click();
  sorting.down = column(); sorting.downSaid = head.getAttribute("aria-sort");
  const named = Array.from(table.tHead.rows[0].cells)[1];
  named.querySelector("button").click();
  sorting.otherSaid = head.getAttribute("aria-sort");
  sorting.words = Array.from(table.tBodies[0].rows).map(row => row.cells[1].dataset.value);
  const chooser = doc.getElementById("workload");
  let filtered = null;
  if (chooser) {
    chooser.value = chooser.options[1].value;
    chooser.dispatchEvent(new win.Event("change"));
    const rows = Array.from(table.tBodies[0].rows);
    filtered = { chosen: chooser.value, all: rows.length,
      left: rows.filter(shown).map(row => row.dataset.workload), said: doc.getElementById("shown").textContent };
  }
  return {
    width: win.innerWidth, scrollWidth: root.scrollWidth, bodyWidth: doc.body.scrollWidth, scrolled: win.scrollX,
    sizes, overlaps, outside, least, leastText, sorting, filtered,
    hidden,
    boxes: Array.from(doc.querySelectorAll(".box")).map(box => [box.clientWidth, box.scrollWidth]),
    alerted: "attacked" in win,
  };
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two workloads; one has cells without their own figures and a failed cell."""
    folder = tmp_path_factory.mktemp("run")
    saved_run(folder)
    plain = Cell(
        "other", "plain", place="virtual", clock="virtual", device="titan-x", step_ns=10**9, peak_bytes=1 << 33
    )
    failed = replace(plain, peer="failing", status="failed", said="a long remark " * 20, step_ns=None, peak_bytes=None)
    peers = [replace(plain, peer=f"peer-{place}", step_ns=10**9 + 10**7 * place) for place in range(5)]
    append_cells(folder, [plain, failed, *peers])
    write_html(folder, folder / "page.html")
    return folder / "page.html"


@pytest.fixture(scope="module")
def seen(page: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Seen]:
    assert BROWSER is not None
    return {width: look_at(BROWSER, page, width, LOOK, tmp_path_factory.mktemp("browser")) for width in WIDTHS}


def found(seen: dict[int, Seen], width: int) -> Any:
    findings = seen[width].findings
    assert "error" not in findings, findings
    return findings


@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_never_scrolls_sideways(seen: dict[int, Seen], width: int) -> None:
    findings = found(seen, width)
    assert findings["width"] == width
    assert findings["scrollWidth"] <= width
    assert findings["bodyWidth"] <= width
    assert findings["scrolled"] == 0
    assert all(inner <= width for inner, _ in findings["boxes"])


def test_on_a_phone_tables_scroll_in_their_own_boxes(seen: dict[int, Seen]) -> None:
    assert any(inner < outer for inner, outer in found(seen, 400)["boxes"])


@pytest.mark.parametrize("width", [1300, 1400])
def test_on_a_desktop_no_table_scrolls(seen: dict[int, Seen], width: int) -> None:
    boxes = found(seen, width)["boxes"]
    assert boxes
    assert [(inner, outer) for inner, outer in boxes if inner < outer] == []


@pytest.mark.parametrize("width", WIDTHS)
def test_every_figure_is_there_once_in_the_shape_for_the_window(seen: dict[int, Seen], width: int) -> None:
    findings = found(seen, width)
    # Two trade-offs, and the memory and the timeline of each of two steps.
    assert len(findings["sizes"]) == 2 + 4
    assert findings["hidden"] == len(findings["sizes"])
    assert all(wide > 300 and high > 100 for wide, high in findings["sizes"])


@pytest.mark.parametrize("width", WIDTHS)
def test_no_text_is_smaller_than_14_pixels(seen: dict[int, Seen], width: int) -> None:
    findings = found(seen, width)
    assert findings["least"] >= 13.99, findings["leastText"]


@pytest.mark.parametrize("width", WIDTHS)
def test_no_text_of_a_figure_lies_on_another_or_outside(seen: dict[int, Seen], width: int) -> None:
    findings = found(seen, width)
    assert findings["overlaps"] == []
    assert findings["outside"] == []


@pytest.mark.parametrize("width", WIDTHS)
def test_a_heading_sorts_and_says_so(seen: dict[int, Seen], width: int) -> None:
    sorting = found(seen, width)["sorting"]
    assert sorting["focused"], "a key reaches it"
    values = [float(value) for value in sorting["up"] if value]
    assert values == sorted(values)
    assert len(set(values)) > 1
    assert sorting["up"] != sorting["before"]
    assert [float(value) for value in sorting["down"] if value] == sorted(values, reverse=True)
    assert sorting["up"][-1] == sorting["down"][-1] == "", "what has no value stands last"
    assert (sorting["upSaid"], sorting["downSaid"], sorting["otherSaid"]) == ("ascending", "descending", "none")
    assert sorting["words"] == sorted(sorting["words"])


@pytest.mark.parametrize("width", WIDTHS)
def test_one_workload_can_be_shown_alone(seen: dict[int, Seen], width: int) -> None:
    filtered = found(seen, width)["filtered"]
    assert filtered["chosen"] == "network"
    assert set(filtered["left"]) == {"network"}
    assert filtered["said"] == f"{len(filtered['left'])} rows of {filtered['all']}"
    assert 0 < len(filtered["left"]) < filtered["all"]


@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_is_asked_for_and_nothing_is_complained_of(seen: dict[int, Seen], width: int) -> None:
    assert seen[width].asked == ()
    assert seen[width].complaints == ()


def test_a_hostile_name_runs_nothing(tmp_path: Path) -> None:
    hostile_step().save(tmp_path)
    attack = HOSTILE.replace("alert(1)", "window.attacked=1").replace("alert(2)", "window.attacked=2")
    cell = Cell(attack, "plain", place="virtual", clock="virtual", device=attack, step_ns=9, peak_bytes=9)
    append_cells(tmp_path, [cell, replace(cell, peer="vdnn-auto", said=attack), replace(cell, workload="b")])
    write_html(tmp_path, tmp_path / "page.html")
    assert BROWSER is not None
    findings = look_at(BROWSER, tmp_path / "page.html", 400, LOOK, tmp_path / "profile").findings
    assert findings.get("alerted") is False, findings
    assert findings["scrollWidth"] <= 400


def test_the_look_finds_what_is_wrong(tmp_path: Path) -> None:
    """The faulty page is too wide, has small text, a failing script and a request."""
    page = tmp_path / "page.html"
    page.write_text(
        '<!DOCTYPE html><main><h2>a</h2><div class="box"><table><thead><tr><th>peak<button></button></th><th>b<button>'
        '</button></th></tr></thead><tbody><tr><td data-value="1">x</td><td data-value="2">y</td></tr></tbody></table>'
        '</div><p style="width:900px;font-size:9px">small</p><link rel="stylesheet" href="other.css">'
        '<figure><svg viewBox="0 0 10 10" width="10" height="10"><text x="0" y="5">on</text>'
        '<text x="1" y="5">one</text></svg></figure></main>'
        "<script>throw new Error('complaint')</script>"
    )
    assert BROWSER is not None
    seen = look_at(BROWSER, page, 400, LOOK, tmp_path / "profile")
    findings = seen.findings
    assert findings["scrollWidth"] > 400
    assert findings["least"] == 9
    assert findings["overlaps"] == [["on", "one"]]
    assert findings["outside"]
    assert seen.asked == ("/other.css",)
    assert any("complaint" in line for line in seen.complaints)
