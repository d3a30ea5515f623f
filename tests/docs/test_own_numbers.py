"""The numbers that docs/when.md gives are those of benchmarks/results: its table is made again from the file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "when.md"
MATRIX = ROOT / "benchmarks" / "results" / "plan_matrix_rebuilds.jsonl"
CARD = "h100"
GIB = 1 << 30
# Of the way from the least memory that any plan reaches to everything kept.
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
    """A line of the table for each network: the peak with everything kept, and what budgets below it cost."""
    cells = {}
    for line in matrix.read_text().splitlines():
        cell = json.loads(line)
        if cell["hardware"] == CARD and cell["policy"] in ("auto", "auto-offload"):
            cells[cell["network"], cell["share"], cell["policy"]] = cell
    largest = max(share for _, share, _ in cells)
    for network, name in NAMES.items():
        least = cells[network, 0.0, "auto"]
        # Budgets lie evenly between the least and everything kept, which the file does not have.
        above = cells[network, largest, "auto"]["budget_bytes"] - least["budget_bytes"]
        kept_bytes = least["budget_bytes"] + above / largest
        columns = [f"{name} ({least['batch']})", f"{kept_bytes / GIB:.1f} GiB"]
        for share in SHARES:
            cell = cells[network, share, "auto"]
            columns.append(f"{cell['budget_bytes'] / kept_bytes:.0%}: {cell['step_ns'] / cell['keep_ns'] - 1:.1%}")
        moves = cells[network, SHARES[-1], "auto-offload"]
        columns.append(f"{moves['step_ns'] / moves['keep_ns'] - 1:.1%}")
        yield "| " + " | ".join(columns).replace("%", " %") + " |"


def missing_rows(text: str, matrix: Path) -> list[str]:
    return [row for row in rows_of(matrix) if row not in text.splitlines()]


def test_the_table_is_that_of_the_results() -> None:
    assert missing_rows(PAGE.read_text(), MATRIX) == []


def test_a_number_that_is_not_that_of_the_results_is_found() -> None:
    text = PAGE.read_text()
    row = next(rows_of(MATRIX))
    assert missing_rows(text.replace(row, row.replace("ResNet-50 (128) | 10.4", "ResNet-50 (128) | 10.5")), MATRIX) == [
        row
    ]


@pytest.mark.parametrize("quoted", ["resnet50, save-on-cpu-pinned (+1763.6%, 15% of the memory)", "11 of 12 meetings"])
def test_what_the_page_says_of_claims_is_in_the_claims(quoted: str) -> None:
    assert quoted in (ROOT / "benchmarks" / "results" / "sweep_virtual_h100" / "claims.txt").read_text()
