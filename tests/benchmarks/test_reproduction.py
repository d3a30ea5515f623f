"""The reproduction table: the smallest network through the whole program, and the text for made-up rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.models import VDNN_NETWORKS
from benchmarks.vdnn_paper import reproduction
from benchmarks.vdnn_paper.reproduction import GIB, PUBLISHED, NetworkRow, Outcome, render, sentence


def test_every_network_of_the_paper_has_its_published_figures() -> None:
    assert list(PUBLISHED) == [network.title for network in VDNN_NETWORKS]


def test_a_network_that_fits_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.jsonl"
    assert reproduction.main(["--networks", "AlexNet-128", "--json", str(path)]) == 0
    (row,) = map(json.loads, path.read_text().splitlines())
    assert row["keep_bytes"] < 12 * GIB
    for policy in ("dyn", "auto", "auto_at_dyn"):
        assert row[policy]["step_ns"] == row["keep_ns"]
    assert row["everything"]["step_ns"] > row["keep_ns"]
    assert row["everything"]["peak_bytes"] < row["keep_bytes"]
    said = capsys.readouterr().out
    assert "AlexNet (128)" in said
    assert said.rstrip().endswith("Every network fits with everything kept.")


def row(network: str, keep: int, dyn: tuple[int, int], auto: tuple[int, int]) -> NetworkRow:
    """A row with peaks in GiB, and times relative to 1000 for everything kept."""
    budget = 12 * GIB
    one, other = (Outcome("any", budget, time, peak * GIB) for peak, time in (dyn, auto))
    return NetworkRow(network, 1000, keep * GIB, 8 * GIB, 2.0 * GIB, one, one, other, other)


def test_what_does_not_fit_is_marked_and_the_sentence_says_both() -> None:
    rows = [row("VGG-16 (256)", 19, (13, 1015), (11, 1008)), row("VGG-416 (32)", 63, (6, 1026), (12, 1000))]
    table = render(rows)
    assert "(over) 13.00" in table
    assert "75" in table  # 2 of 8 GiB by the rules
    assert sentence(rows) == (
        "VGG-16 (256) needs 19.0 GiB, and trains in 11.0 GiB of a virtual Titan X 0.8 % slower than with enough "
        "memory; the policy of 2016 takes 13.0 GiB and is 1.5 % slower."
    )
    assert sentence(rows[1:]).startswith("VGG-416 (32) needs 63.0 GiB")


def test_an_unknown_network_is_refused_with_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert reproduction.main(["--networks", "VGG-17"]) == 2
    said = capsys.readouterr().err
    assert "got 'VGG-17'" in said
    assert "VGG-16-256" in said
