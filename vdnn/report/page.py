"""Writes the report as one HTML file with sentences, tables, figures and the sources of the numbers.

All text from the run is escaped. The page's content policy allows only its own script and no request, so that text from
the run, such as the name of a layer, cannot run anything.
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Sequence
from html import escape
from pathlib import Path

from vdnn.errors import LibraryMissingError
from vdnn.report.comparison import Comparison, cells_of_run, comparisons, workloads_of
from vdnn.report.drawing import NARROW, WIDE, Picture, require_matplotlib
from vdnn.report.figures import Figures, figures_of, opened_steps
from vdnn.report.headline import RULE, headline, named_points
from vdnn.report.page_tables import Column, Entry, Row, cells_table, size, storages_table, table, words
from vdnn.report.palette import SHADES
from vdnn.report.prediction import errors_text, peaks_of, times_of
from vdnn.report.provenance import provenance
from vdnn.report.run_folder import Run, read_run
from vdnn.report.step_timeline import shown_timelines, summary_of
from vdnn.report.storage_table import largest_storages
from vdnn.step.json_form import save_text
from vdnn.step.plan_use import PlanSummary, PlanUse
from vdnn.step.saved_step import SavedStep

_STORAGES = 12  # in the table of a step
_DRAWN_STEPS = 30  # the most steps with figures: each has several hundred kB


def write_html(run: Run | str | os.PathLike[str], path: str | os.PathLike[str]) -> None:
    """Write the page to `path`. Without matplotlib the page has its tables, and says that figures need matplotlib."""
    save_text(page_of(run if isinstance(run, Run) else read_run(run)), Path(path))


def page_of(run: Run) -> str:
    compared = comparisons(run)
    figures, missing = figures_of(run), ""
    try:
        require_matplotlib()
    except LibraryMissingError as error:
        missing = str(error)
    body = "\n".join(
        part
        for part in (
            _top(run, compared),
            _chooser(run, compared),
            _leading(figures, missing),
            _comparisons(figures, missing),
            _all_cells(compared),
            _prediction(run, figures, missing),
            _steps(run, figures, missing),
            _trainings(run, figures, missing),
            _left_out(run, figures, missing),
            _provenance(run),
        )
        if part
    )
    policy = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src '{script_hash()}'"
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f'<link rel="icon" href="data:,">\n<title>{escape(run.name)}: vdnn report</title>\n'
        f"<style>{style()}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n<script>{SCRIPT}</script>\n</body>\n</html>\n"
    )


def _top(run: Run, compared: Sequence[Comparison]) -> str:
    found = named_points(compared)
    listed = "".join(
        f'<li data-workload="{escape(one.comparison.workload)}">{_unbroken(escape(str(one)))}</li>' for one in found
    )
    points = f'<ul class="points">{listed}</ul>' if len(found) > 1 else ""
    rule = f'<p class="note">Memory is the peak of bytes allocated on the device. {escape(RULE)}</p>' if found else ""
    above = f'<p class="above">vdnn report on {escape(run.name)}</p>'
    return f"{above}\n<h1>{_unbroken(escape(headline(compared)))}</h1>\n{points}{rule}"


def _unbroken(text: str) -> str:
    """The text with no line break between a number and its per cent sign."""
    return text.replace(" %", "&nbsp;%")


def _chooser(run: Run, compared: Sequence[Comparison]) -> str:
    names = workloads_of(compared)
    if len(names) < 2:
        return ""
    options = "".join(f'<option value="{escape(name)}">{escape(name)}</option>' for name in names)
    return (
        '<div class="bar"><label for="workload">workload</label>'
        f'<select id="workload"><option value="">all workloads</option>{options}</select>'
        f'<span class="note" id="shown" role="status" data-all="{len(cells_of_run(run))}"></span></div>'
    )


def _leading(figures: Figures, missing: str) -> str:
    if not figures.leading or missing:
        return ""
    caption = (
        "Grey: everything kept, as plain PyTorch does. Green: the same step with vdnn. The dashed line is the budget."
    )
    parts = [
        f'<section data-workload="{escape(picture.workload)}"><h3>{escape(picture.title)}</h3>'
        f"{_figure(picture, caption)}</section>"
        for picture in figures.leading
    ]
    return "<h2>Memory over one step</h2>\n" + "\n".join(parts)


def _comparisons(figures: Figures, missing: str) -> str:
    parts = ["<h2>Memory against time</h2>"] if figures.compared else []
    for comparison, picture in zip(figures.compared, figures.trade_offs, strict=True):
        caption = (
            "Further left and further down is better. Filled: no other point is better in both memory and time. "
            "Arrows: above the upper edge."
            + (" Times and bytes are virtual." if comparison.is_virtual else "")
            + _ended(comparison)
        )
        heading = f"<h3>{escape(comparison.name)} on {escape(comparison.where)}</h3>"
        shown = "" if missing else _figure(picture, caption)
        parts.append(f'<section data-workload="{escape(comparison.workload)}">{heading}{shown}</section>')
    return "\n".join(parts)


def _ended(comparison: Comparison) -> str:
    """A sentence that names the cells without a point in the picture."""
    ended = [
        f"{cell.peer}{f' {cell.budget_text}' if cell.budget else ''} ({cell.status})" for cell in comparison.unmeasured
    ]
    return f" Not drawn: {', '.join(ended)}." if ended else ""


def _all_cells(compared: Sequence[Comparison]) -> str:
    if not compared:
        return ""
    places = {one.where for one in compared}
    where = f" All rows are of {escape(places.pop())}." if len(places) == 1 else ""
    note = f'<p class="note">Click a heading to sort.{where}</p>'
    return f"<h2>All rows</h2>\n{note}\n{cells_table(compared)}"


def _prediction(run: Run, figures: Figures, missing: str) -> str:
    cells = cells_of_run(run)
    times, peaks = times_of(cells), peaks_of(cells)
    if not times and not peaks:
        return ""
    said = [errors_text(found, what) for found, what in ((times, "step times"), (peaks, "peaks")) if found]
    listed = "".join(f"<li>{escape(one)}</li>" for one in said)
    caption = "Points on the diagonal are as predicted. The grey band is 10 % to either side."
    shown = "" if missing or figures.prediction is None else _figure(figures.prediction, caption)
    return f"<h2>Prediction against measurement</h2>\n<ul>{listed}</ul>\n{shown}"


def _steps(run: Run, figures: Figures, missing: str) -> str:
    if not run.steps:
        return ""
    opened = opened_steps(run, comparisons(run))
    drawn = {step.name for step in sorted(run.steps, key=lambda step: step.name not in opened)[:_DRAWN_STEPS]}
    parts = [
        _step(run, step, figures, is_drawn=not missing and step.name in drawn, is_open=step.name in opened)
        for step in run.steps
    ]
    note = ""
    if len(drawn) < len(run.steps):
        note = (
            f'<p class="note">This page has figures for {len(drawn)} of {len(run.steps)} steps. '
            "<code>vdnn report RUN --figures FOLDER</code> draws all.</p>"
        )
    return f"<h2>Steps</h2>\n{note}" + "\n".join(parts)


def _step(run: Run, step: SavedStep, figures: Figures, *, is_drawn: bool, is_open: bool) -> str:
    shown = shown_timelines(step)
    lines = "".join(f"<p>{escape(summary_of(one))}.</p>" for one in shown)
    drawn = ""
    if is_drawn:
        lines = ""  # the title of the timeline has the summary
        drawn = "".join(_figure(picture, picture.title) for picture in figures.steps[step.name])
    rows = largest_storages(step, _STORAGES)
    listed = ""
    if rows and step.recording is not None:
        count = len(step.recording.lifetimes)
        listed = f"<h3>The {len(rows)} largest of {count} storages</h3>" + storages_table(rows, "largest storages")
    plans = "" if step.plan_use is None else plans_of_session(step.plan_use)
    brief = f" <span>{shown[-1].step_ns / 1e6:.1f} ms</span>" if shown else ""
    return (
        f'<details data-workload="{escape(run.workload_of(step))}"{" open" if is_open else ""}>'
        f"<summary>{escape(run.title_of(step))}{brief}</summary>{lines}{drawn}{plans}{listed}</details>"
    )


def _trainings(run: Run, figures: Figures, missing: str) -> str:
    parts = ["<h2>Whole trainings</h2>"] if run.trainings else []
    for report, pictures in zip(run.trainings, figures.trainings, strict=True):
        drawn = "" if missing else "".join(_figure(picture, picture.title) for picture in pictures)
        text = escape(str(report))
        parts.append(f'<section data-workload="{escape(pictures[0].workload)}">{drawn}<pre>{text}</pre></section>')
    return "\n".join(parts)


def _figure(picture: Picture, caption: str) -> str:
    said = f'<svg role="img" aria-label="{escape(picture.described)}" '
    drawn = [picture.inline(shape).replace("<svg ", said, 1) for shape in (WIDE, NARROW)]
    return (
        f'<figure><div class="wide">{drawn[0]}</div><div class="narrow">{drawn[1]}</div>'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )


def _left_out(run: Run, figures: Figures, missing: str) -> str:
    reasons = [*run.notes, *([f"All figures: {missing}"] if missing else []), *figures.left_out]
    if not reasons:
        return ""
    listed = "".join(f"<li>{escape(one)}</li>" for one in reasons)
    return f"<h2>What is missing, and why</h2>\n<ul>{listed}</ul>"


def _provenance(run: Run) -> str:
    pairs = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in provenance(run))
    return f"<h2>Sources of the numbers</h2>\n<dl>{pairs}</dl>"


# The page's script: sorts tables by a click or a key on a column's heading, and shows one workload or all.
#
# Cells carry the value that they are sorted by. Rows without a value come last in either order. The page is complete
# and readable without the script.

SCRIPT = """
"use strict";
function sortBy(button) {
  const head = button.closest("th"), body = head.closest("table").tBodies[0];
  const column = head.cellIndex, wasUp = head.getAttribute("aria-sort") === "ascending";
  const isNumber = head.classList.contains("number");
  for (const other of head.parentNode.cells) other.setAttribute("aria-sort", "none");
  head.setAttribute("aria-sort", wasUp ? "descending" : "ascending");
  const way = wasUp ? -1 : 1;
  const valueOf = row => row.cells[column].dataset.value;
  const rows = Array.from(body.rows);
  rows.sort((one, other) => {
    const a = valueOf(one), b = valueOf(other);
    if (a === "" || b === "") return (a === "") - (b === "");
    return way * (isNumber ? a - b : a.localeCompare(b, "en", { numeric: true }));
  });
  body.append(...rows);
}
for (const button of document.querySelectorAll("th button"))
  button.addEventListener("click", () => sortBy(button));

const chooser = document.getElementById("workload");
if (chooser) {
  const parts = Array.from(document.querySelectorAll("[data-workload]"));
  const said = document.getElementById("shown");
  const show = () => {
    let rows = 0;
    for (const part of parts) {
      part.hidden = chooser.value !== "" && part.dataset.workload !== chooser.value;
      if (part.tagName === "TR" && !part.hidden) rows += 1;
    }
    said.textContent = rows + (rows === 1 ? " row" : " rows") + " of " + said.dataset.all;
  };
  chooser.addEventListener("change", show);
  show();
}
"""


def script_hash() -> str:
    """The hash with which the page's content policy allows this script and no other."""
    return "sha256-" + base64.b64encode(hashlib.sha256(SCRIPT.encode("utf-8")).digest()).decode("ascii")


# The page's style sheet, light or dark by the preference of the reader's system.
#
# Text is at least 14 px everywhere. Tables scroll in boxes of their own, so that the page never scrolls sideways. The
# page has each figure twice, wide and narrow, and shows the one that fits the width of the window.

# In a narrower window the text of wide figures would be smaller than 14 px.
WIDE_FROM = 1010


def style() -> str:
    light = "".join(f"--{shade.name}:{shade.light};" for shade in SHADES)
    dark = "".join(f"--{shade.name}:{shade.dark};" for shade in SHADES)
    schemes = f":root{{{light}}}\n@media (prefers-color-scheme: dark){{:root{{{dark}}}}}\n"
    return schemes + _RULES.replace("WIDE_FROM", str(WIDE_FROM))


_RULES = """
:root { color-scheme: light dark; }
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--surface); color: var(--ink);
  font: 16px/1.5 system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif;
}
main { max-width: 1056px; margin: 0 auto; padding: 16px 12px 48px; overflow-wrap: anywhere; }
h1 { font-size: 26px; line-height: 1.25; margin: 4px 0 12px; text-wrap: balance; }
h2 { font-size: 21px; line-height: 1.3; margin: 44px 0 8px; padding-top: 14px; border-top: 1px solid var(--grid); }
h3 { font-size: 17px; margin: 24px 0 6px; }
p, ul { margin: 8px 0; max-width: 75ch; }
ul { padding-left: 20px; }
.above { color: var(--muted); font-size: 15px; margin: 0; }
.note { color: var(--muted); font-size: 15px; }
.points { padding: 0; list-style: none; }
.points li { padding: 8px 0 8px 12px; border-left: 4px solid var(--green); margin: 8px 0; }
.bar {
  position: sticky; top: 0; z-index: 2; background: var(--surface); padding: 8px 0; margin-top: 16px;
  display: flex; flex-wrap: wrap; gap: 4px 16px; align-items: center; border-bottom: 1px solid var(--grid);
}
select, th button, summary { font: inherit; color: inherit; }
select { min-height: 40px; max-width: 100%; padding: 4px 8px; background: var(--surface);
  border: 1px solid var(--muted); border-radius: 6px; }
.box { overflow-x: auto; max-width: 100%; border: 1px solid var(--grid); border-radius: 8px; margin: 10px 0; }
table { border-collapse: collapse; width: 100%; font-size: 15px; line-height: 1.35;
  font-variant-numeric: tabular-nums; }
th, td { padding: 7px 8px; text-align: left; vertical-align: top; overflow-wrap: normal; }
td { border-top: 1px solid var(--grid); }
td.number, th.number { text-align: right; }
td.number { white-space: nowrap; }
td.amounts, th.amounts { text-align: right; }
td.amounts { white-space: pre; }
td.short { white-space: nowrap; }
td.long { min-width: 160px; }
td.remark { min-width: 200px; }
td.name { min-width: 96px; }
th { vertical-align: bottom; padding: 0; font-weight: 600; }
th button { background: none; border: 0; padding: 9px 8px; width: 100%; text-align: inherit; cursor: pointer;
  font-weight: 600; }
th button::after { content: "\\a0\\2195"; color: var(--muted); }
th[aria-sort=ascending] button::after { content: "\\a0\\2191"; color: var(--ink); }
th[aria-sort=descending] button::after { content: "\\a0\\2193"; color: var(--ink); }
tr.own td:nth-child(2) { font-weight: 600; color: var(--green); }
.bad { color: var(--vermilion); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 14px; margin: 8px 0; }
dt { color: var(--muted); }
dd { margin: 0; }
figure { margin: 14px 0 22px; }
figcaption { color: var(--muted); font-size: 15px; max-width: 75ch; margin-top: 6px; }
svg { display: block; width: 100%; height: auto; }
.wide { display: none; }
.narrow { max-width: 520px; }
@media (min-width: WIDE_FROMpx) {
  .wide { display: block; }
  .narrow { display: none; }
  main { padding: 28px 24px 64px; }
  h1 { font-size: 32px; }
  .full { max-width: none; width: min(100vw - 64px, 1600px); margin-left: 50%; transform: translateX(-50%); }
}
details { border: 1px solid var(--grid); border-radius: 8px; padding: 0 12px; margin: 12px 0; }
summary { cursor: pointer; padding: 12px 0; font-weight: 600; }
summary span { font-weight: 400; color: var(--muted); }
:focus-visible { outline: 3px solid var(--blue); outline-offset: 2px; }
[hidden] { display: none !important; }
@media print { details, .box { break-inside: avoid; } .bar { display: none; } }
"""


# The part of the page about the plans of a session: how many steps followed a plan, and a table by size.

_COLUMNS = (
    Column("kind of step", "number"),
    Column("first save, up to", "long"),
    Column("saved", "number"),
    Column("offloaded", "number"),
    Column("predicted slowdown", "number"),
    Column("steps that followed it", "number"),
)


def plans_of_session(use: PlanUse) -> str:
    """Empty before the first step of the session."""
    said = "".join(f"<p>{escape(line[0].upper() + line[1:])}.</p>" for line in use.lines())
    if not said:
        return ""
    rows = [_row(plan) for plan in use.plans]
    return "<h3>The plans of the session</h3>" + said + (table(_COLUMNS, rows, "plans of the session") if rows else "")


def _row(plan: PlanSummary) -> Row:
    return Row(
        (
            Entry(str(plan.kind), plan.kind),
            words(str(plan.first)),
            size(plan.saved_bytes),
            size(plan.offloaded_bytes),
            Entry(f"{plan.slowdown:.3f} x", plan.slowdown),
            Entry(str(plan.steps), plan.steps),
        )
    )
