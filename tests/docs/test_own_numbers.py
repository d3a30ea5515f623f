"""Recomputes numbers of the README and of pages of the docs from benchmarks/results."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from benchmarks.plans.plan_cell import read_plan_cells
from benchmarks.published_speeds import explained, judged, read_speeds, summary
from vdnn.report import Cell
from vdnn.report.run_folder import read_cells

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "when.md"
MATRIX = ROOT / "benchmarks" / "results" / "plan_matrix_recomputes.jsonl"
PICTURES_PAGE = ROOT / "docs" / "how-it-works.md"
PAPER = ROOT / "benchmarks" / "results" / "reproduction.jsonl"
SWEEP = ROOT / "benchmarks" / "results" / "sweep_virtual_h100" / "cells.jsonl"
SPEEDS = ROOT / "benchmarks" / "results" / "published_speeds.jsonl"
STATE_PAGE = ROOT / "docs" / "training-state.md"
WHAT_STAYS = ROOT / "benchmarks" / "results" / "what_stays.txt"
CARD = "h100"
GIB = 1 << 30
# Budgets, as shares of the way from the least memory of any plan to everything kept.
SHARES = (0.0, 0.25, 0.5)
NAMES = {
    "resnet50": "ResNet-50",
    "resnet152": "ResNet-152",
    "densenet121": "DenseNet-121",
    "inception_v3": "Inception v3",
    "googlenet_128": "GoogLeNet",
    "vgg16_256": "VGG-16",
    "alexnet_128": "AlexNet",
    "unet": "U-Net",
    "bert_large": "BERT-large",
    "gpt2_xl": "GPT-2 XL",
    "vit_large": "ViT-L",
    "llama_8b": "Llama, 8B's shapes",
}


def rows_of(matrix: Path) -> Iterator[str]:
    """Yields a table row for each network: the peak with everything kept, and the cost of smaller budgets."""
    cells = {}
    for cell in read_plan_cells(matrix):
        if cell.hardware == CARD and cell.policy in ("auto", "auto-offload"):
            cells[cell.network, cell.share, cell.policy] = cell
    largest = max(share or 0.0 for _, share, _ in cells)
    for network, name in NAMES.items():
        least = cells[network, 0.0, "auto"]
        # The file has no peak with everything kept; budgets are spaced evenly between it and the least.
        above = cells[network, largest, "auto"].budget_bytes - least.budget_bytes
        kept_bytes = least.budget_bytes + above / largest
        columns = [f"{name} ({least.batch})", f"{kept_bytes / GIB:.1f} GiB"]
        for share in SHARES:
            cell = cells[network, share, "auto"]
            columns.append(f"{cell.budget_bytes / kept_bytes:.0%}: {cell.slowdown - 1:.1%}")
        moves = cells[network, SHARES[-1], "auto-offload"]
        columns.append(f"{moves.slowdown - 1:.1%}")
        yield "| " + " | ".join(columns).replace("%", " %") + " |"


def cells_of(sweep: Path) -> dict[tuple[str, str, str | None], Cell]:
    """The cells by workload, peer and budget."""
    return {(cell.workload, cell.peer, cell.budget): cell for cell in read_cells(sweep)}


def facts_of(sweep: Path) -> Iterator[str]:
    """Yields the page's statements on single cells: rows of its second table, and figures in its sentences."""
    cells = cells_of(sweep)

    def of_plain(workload: str, peer: str, budget: str | None = None, what: str = "step_ns") -> float:
        return float(getattr(cells[workload, peer, budget], what) / getattr(cells[workload, "plain", None], what))

    named = {
        "resnet50": "ResNet-50 (128), float32",
        "llama_8b_8k": "Llama, 8B's shapes (1), bfloat16",
        "vit_large": "ViT-L (64), bfloat16",
        "bert_large": "BERT-large (16), bfloat16",
    }
    for workload, name in named.items():
        peak = of_plain(workload, "checkpoint", what="peak_bytes")
        theirs, ours = of_plain(workload, "checkpoint"), of_plain(workload, "vdnn-auto", "=checkpoint")
        yield f"| {name} | {100 * peak:.0f} % | {theirs:.3f} x | {ours:.3f} x |"
    everything, blocking = of_plain("resnet50", "vdnn-all"), of_plain("resnet50", "save-on-cpu-pinned")
    yield f"makes a step of ResNet-50 {everything:.1f} times as long"
    yield f"BERT-large's {of_plain('bert_large', 'vdnn-all'):.1f} times"
    yield f"at {blocking:.1f} times the time of the plain step"
    planned = cells["resnet50", "vdnn-auto", "60%"]
    pinned, moved = (planned.host_bytes or 0) / GIB, (planned.to_host_bytes or 0) / GIB
    yield f"{pinned:.1f} GiB for ResNet-50 (128), though its plans then move {moved:.1f}."
    quarter, less = of_plain("llama_8b_8k", "vdnn-auto", "75%"), of_plain("resnet50", "vdnn-auto", "60%")
    yield f"Llama has a quarter less at {100 * (quarter - 1):.1f} %, ResNet-50 40 % less at {100 * (less - 1):.1f} %"


def steps_of(paper: Path) -> Iterator[str]:
    """Yields the rows of VGG-16 (256) that the paper's table has too: beginnings of lines, and peaks of pictures."""
    networks = (json.loads(line) for line in paper.read_text().splitlines())
    vgg = next(one for one in networks if one["network"] == "VGG-16 (256)")
    kept_ms = vgg["keep_ns"] / 1e6
    yield f"| everything kept (does not fit the card) | {vgg['keep_bytes'] / GIB:.2f} GiB | {kept_ms:.1f} ms |"
    for name, policy in (("`vdnn-all`", "everything"), ("`auto`, 12 GiB", "auto")):
        step_ms, peak = vgg[policy]["step_ns"] / 1e6, vgg[policy]["peak_bytes"] / GIB
        yield f"| {name} | {peak:.2f} GiB | {step_ms:.1f} ms, {100 * (step_ms / kept_ms - 1):.1f} % longer |"
        yield f"the peak falls from {vgg['keep_bytes'] / GIB:.2f} to {peak:.2f} GiB"


def speeds_of(published: Path) -> Iterator[str]:
    """Yields what the README says of published speeds."""
    rows = judged(read_speeds(published).values())
    median, worst = summary(one.after for one in rows)
    yield f"Over {len(rows)} published trainings on one GPU it is off by {median:.2f} x in the median, {worst:.2f} x at"
    assert explained(rows) == {}
    all_but_calibration = [one.after for one in read_speeds(published).values() if not one.is_calibration]
    assert len(all_but_calibration) - len(rows) == 4
    yield f"with them the worst is {summary(all_but_calibration)[1]:.2f} x"


def times_of(text: str, row: str) -> list[tuple[str, list[str]]]:
    """Returns the per cent and the times of each row of the tables."""
    return [(one[1], re.findall(r"[\d.]+ ms", one[2])) for one in re.finditer(row, text, re.MULTILINE)]


def unsaid(text: str, facts: Iterable[str]) -> list[str]:
    """Returns the facts that the text lacks, ignoring line breaks."""
    text = " ".join(text.split())
    return [fact for fact in facts if fact not in text]


def test_the_table_of_budgets_is_that_of_the_results() -> None:
    assert unsaid(PAGE.read_text(), rows_of(MATRIX)) == []


def test_what_the_page_says_of_peers_is_that_of_the_sweep() -> None:
    assert unsaid(PAGE.read_text(), facts_of(SWEEP)) == []


def test_what_the_page_with_pictures_says_is_that_of_the_papers_table() -> None:
    assert unsaid(PICTURES_PAGE.read_text(), steps_of(PAPER)) == []


def test_what_the_readme_says_of_published_speeds_is_that_of_the_results() -> None:
    assert unsaid((ROOT / "README.md").read_text(), speeds_of(SPEEDS)) == []


def test_the_page_of_hardware_shows_the_table_of_published_speeds() -> None:
    text = (ROOT / "docs" / "hardware.md").read_text()
    assert SPEEDS.with_suffix(".txt").read_text() in text
    before, now = (
        summary(one.before for one in judged(read_speeds(SPEEDS).values())),
        summary(one.after for one in judged(read_speeds(SPEEDS).values())),
    )
    decision = next((ROOT / "docs" / "decisions").glob("0043-*.md")).read_text()
    told = [
        f"were off by {before[0]:.2f} x in the median and {before[1]:.2f} x at worst",
        f"Now it is {now[0]:.2f} x and {now[1]:.2f} x",
    ]
    assert unsaid(decision, told) == []
    assert unsaid(PAGE.read_text(), [f"they are off by {now[0]:.2f} x in the median"]) == []


def test_the_tables_of_what_stays_are_those_of_the_results() -> None:
    known = times_of(WHAT_STAYS.read_text(), r"^(\d+)% (.*)$")
    said = times_of(STATE_PAGE.read_text(), r"^\| (\d+) % \|(.*)$")
    assert len(said) == 15
    assert [row for row in said if row not in known] == []


def test_a_number_that_is_not_that_of_the_results_is_found() -> None:
    text = PAGE.read_text()
    row, fact = next(rows_of(MATRIX)), next(facts_of(SWEEP))
    assert unsaid(text.replace("(128) | 10.5 GiB", "(128) | 10.6 GiB", 1), rows_of(MATRIX)) == [row]
    assert unsaid(text.replace("1.120 x", "1.118 x"), facts_of(SWEEP)) == [fact]


@pytest.mark.parametrize("quoted", ["resnet50, save-on-cpu-pinned (+975.3%, 15% of the memory)", "11 of 12 meetings"])
def test_what_the_page_says_of_claims_is_in_the_claims(quoted: str) -> None:
    assert quoted in (ROOT / "benchmarks" / "results" / "sweep_virtual_h100" / "claims.txt").read_text()
