"""benchmarks.on_a_gpu.saved_on_cuda without a GPU: its comparison, and that it detects a difference."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks.on_a_gpu import link_sizes, saved_on_cuda
from benchmarks.on_a_gpu.saved_on_cuda import CASES, SMALL_CASES, SavedCase, compare, predicted

RESULTS = Path(saved_on_cuda.__file__).parents[1] / "results"

pytestmark = pytest.mark.slow


def test_a_cpu_saves_wider_masks_of_dropout_than_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "saved.jsonl"
    assert saved_on_cuda.main(["--device", "cpu", "--json", str(path)]) == 0
    rows = {row["case"]: row for row in map(json.loads, path.read_text().splitlines())}
    assert list(rows) == [case.name for case in SMALL_CASES]
    resnet, bert, gpt = rows.values()
    for row in (resnet, gpt):  # these have no dropout
        assert row["predicted_bytes"] == row["found_bytes"] > 0
        assert row["only_predicted"] == row["only_found"] == []
    # Masks of the embedding, the attention's output and the perceptron's output: 64 x 1024; of the attention's map: 16
    # x 64 x 64. The CPU stores them as floats, a GPU as bytes.
    elements = 3 * 64 * 1024 + 16 * 64 * 64
    assert bert["found_bytes"] - bert["predicted_bytes"] == 3 * elements
    assert "BERT, 1 layer (1 x 64), only predicted: " in capsys.readouterr().out


def test_steps_that_save_alike_do_not_differ() -> None:
    case = SMALL_CASES[0]
    row = compare(case, predicted(case), predicted(case))
    assert (row.difference, row.only_predicted, row.only_found) == (0.0, (), ())
    assert row.found_storages > 0


def test_a_model_that_fails_is_said_and_does_not_hide_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> None:
        raise RuntimeError("no such model\nanywhere")

    monkeypatch.setattr(saved_on_cuda, "SMALL_CASES", (SavedCase("broken", broken), SMALL_CASES[0]))  # type: ignore[arg-type]
    assert saved_on_cuda.main(["--device", "cpu"]) == 1
    said = capsys.readouterr().out
    assert "broken: RuntimeError: no such model." in said
    assert SMALL_CASES[0].name in said


def test_the_link_is_measured_at_every_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "link.jsonl"
    assert link_sizes.main(["--device", "sim", "--json", str(path)]) == 0
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["block_bytes"] for row in rows] == list(link_sizes.SIZES)
    rates = [row["to_host_bytes_per_s"] for row in rows]
    assert rates == sorted(rates)  # a latency weighs less on longer copies
    assert {row["pageable_to_host_bytes_per_s"] for row in rows} == {None}
    assert "256.00 MiB" in capsys.readouterr().out


def saved_on_the_h200() -> dict[str, tuple[float, int]]:
    """The MiB and the storages that an H200 saved, by model. What was predicted then stands before each of them."""
    rows = (RESULTS / "gpu_saved.txt").read_text().splitlines()
    figures = r"(.+?)  +[\d.]+ +([\d.]+) +[+-][\d.]+% +\d+ +(\d+)"
    found = [re.fullmatch(figures, row) for row in rows]
    return {one[1]: (float(one[2]), int(one[3])) for one in found if one}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_an_h200_saved_is_predicted(case: SavedCase) -> None:
    megabytes, storages = saved_on_the_h200()[case.name]
    recording = predicted(case)
    assert recording.managed_bytes / 2**20 == pytest.approx(megabytes, abs=0.05), "as it was printed"
    assert len(recording.lifetimes) == storages
