"""The table of published speeds: its rows can be run, and the committed figures are those that the program computes."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.published_speeds import Speed, explained, judged, main, measured, off_by, read_speeds, render, summary
from benchmarks.speeds.networks import NETWORKS
from benchmarks.speeds.rows import ROWS
from vdnn.hardware import load_profile, profile_names

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
FIGURES, TABLE = RESULTS / "published_speeds.jsonl", RESULTS / "published_speeds.txt"


def test_at_least_thirty_rows_are_judged_and_each_can_be_run() -> None:
    assert len({row.key for row in ROWS}) == len(ROWS)
    assert sum(not row.is_calibration for row in ROWS) >= 30
    assert {row.card for row in ROWS} <= set(profile_names())
    assert {row.network for row in ROWS} <= set(NETWORKS)
    assert all(len(row.source.split()) >= 2 for row in ROWS)


def test_the_committed_table_is_that_of_the_committed_figures() -> None:
    speeds = read_speeds(FIGURES)
    assert list(speeds) == [row.key for row in ROWS]
    assert TABLE.read_text() == render(list(speeds.values())) + "\n"


@pytest.mark.parametrize(
    "key",
    [
        "titan-x: AlexNet, 128, float32",
        "rtx-3090: ResNet-18, 512, float16",
        "rtx-3090: ResNet-18, 512, float16, channels last",
    ],
)
def test_a_committed_figure_is_the_one_that_the_program_computes(key: str) -> None:
    row = next(row for row in ROWS if row.key == key)
    assert measured(row) == read_speeds(FIGURES)[key]


def test_a_row_that_calibrated_a_figure_is_not_judged() -> None:
    right, far = Speed("a: b", 100, 100, 110, False), Speed("a: c", 100, 100, 900, True)
    assert judged([right, far]) == [right]
    assert "of 1 rows" in render([right, far])


def test_a_row_that_needs_more_than_the_cards_peak_is_shown_with_its_arithmetic_and_not_judged() -> None:
    row = next(row for row in ROWS if row.card == "v100-32" and "512" in row.network and row.precision == "float32")
    layers, head = 24 * (12 * 1024**2 + 2 * 512 * 1024), 80 / 512 * (1024**2 + 1024 * 30522)
    flop_per_token = 2 * 3 * (layers + head)  # a product and an addition, in the forward pass and for both gradients
    assert row.per_s * 512 * flop_per_token > load_profile(row.card).flop_per_s["float32"]
    assert f"{row.per_s * 512 * flop_per_token / 1e12:.1f} TFLOP/s" in row.why
    beside, impossible = Speed("a: b", 100, 100, 110, False), Speed(row.key, 100, 100, 190, False)
    assert judged([beside, impossible]) == [beside]
    assert "Not judged, off by up to 1.90 x: v100-32: BERT-large, 512" in " ".join(render([beside, impossible]).split())


def test_rows_that_are_not_judged_are_of_one_column_of_one_table() -> None:
    doubtful = [row for row in ROWS if row.is_unjudgeable]
    assert len({row.source for row in doubtful}) == 1
    for row in doubtful:
        shorter = (one for one in ROWS if one.source == row.source and "128 tokens" in one.network)
        beside = next(one for one in shorter if (one.card, one.precision) == (row.card, row.precision))
        assert 1.33 < 512 * row.per_s / (128 * beside.per_s) < 1.53


def test_a_row_is_as_far_off_if_it_is_too_fast_as_if_it_is_too_slow() -> None:
    assert off_by(0.5) == off_by(2.0) == 2.0
    assert summary([0.5, 1.0, 1.25]) == (1.25, 2.0)


def test_rows_that_are_far_off_have_their_reasons_below_the_table() -> None:
    reasons = explained(read_speeds(FIGURES).values())
    text = " ".join(TABLE.read_text().split())
    assert all(f"{why or 'unexplained'}." in text for why in reasons.values())
    assert all(key in text for key in reasons)


def test_a_row_that_does_not_exist_is_refused_with_an_example(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([str(tmp_path / "speeds.jsonl"), "--row", "gtx-9090"])
    assert "no row has ['gtx-9090']: a row is named as in 'titan-x: AlexNet" in capsys.readouterr().err
