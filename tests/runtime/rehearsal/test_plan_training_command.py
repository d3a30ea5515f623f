"""`vdnn plan --training`: its output, its table of batches, and the options that exclude each other."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from vdnn.cli.main import main
from vdnn.cli.plan_command import batches_of
from vdnn.report.training_report import TrainingReport

PROGRAM = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))

    def forward(self, x):
        return x + self.mlp(x)

def build(batch):
    return nn.Sequential(*[Block() for _ in range(3)]), torch.randn(batch, 64, 256)
"""
Planned = Callable[..., tuple[int, str, str]]


@pytest.fixture
def planned(tmp_path: Path, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest) -> Planned:
    name = f"program_{abs(hash(request.node.name))}"
    path = tmp_path / f"{name}.py"
    path.write_text(PROGRAM)

    def run(*options: str) -> tuple[int, str, str]:
        code = main(["plan", f"{path}:build", *options])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


def test_a_table_says_what_lives_where(planned: Planned) -> None:
    code, out, _ = planned(
        *("--batch", "8", "--training", "--optimizer", "adamw", "--hardware", "rtx-4090", "--host", "1GiB"),
        *("--budget", "24MiB"),
    )
    assert code == 0
    assert "the whole training" in out
    assert "certified" in out
    assert "host memory" in out
    header = next(line for line in out.splitlines() if "optimizer state" in line and "to device" in line)
    assert header.split()[0] == "units"


def test_the_table_has_a_row_for_each_batch_and_the_largest_follow(planned: Planned) -> None:
    code, out, _ = planned(
        *("--batch", "4,8,4000", "--host", "64MiB", "--optimizer", "adamw", "--hardware", "rtx-4090"),
        *("--budget", "48MiB", "--largest-model", "--largest-batch", "--no-bound"),
    )
    assert code == 0
    rows = [line.split() for line in out.splitlines() if line.split()[:1] in (["4"], ["8"], ["4000"])]
    assert [row[0] for row in rows] == ["4", "8", "4000"]
    assert "does not fit" in " ".join(rows[2])
    assert "largest batch: " in out
    assert "layers as 1; this one has 3" in out


def test_json_has_its_form_and_its_version(planned: Planned, tmp_path: Path) -> None:
    _, out, _ = planned("--batch", "8", "--training", "--optimizer", "sgd", "--hardware", "rtx-4090", "--json")
    found = json.loads(out)
    assert (found["form"], found["version"]) == ("vdnn training plan", 1)
    path = tmp_path / "plan.json"
    path.write_text(out)
    assert TrainingReport.load(path).batch == 8


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--training", "--compare", "all"), "--compare and --training: expected one of them"),
        (("--host", "1GiB", "--policy", "lru"), "--policy and --host: expected one of them"),
        (("--clip", "--allow", "in-backward"), "--clip and --allow in-backward: expected one of them"),
        (("--host-cores", "4"), "--host-cores: expected --allow cpu-step beside it"),
        (("--host-cores", "0"), "--host-cores: expected --allow cpu-step beside it"),
        (("--shard", "ddp"), "--shard: expected --ranks beside it"),
        (("--ranks", "1"), "--ranks: expected a number of cards, 2 or more, got 1"),
        (("--ranks", "2", "--compare", "all"), "--compare and --ranks: expected one of them"),
        (("--training", "--micro-batches", "-1"), "--micro-batches: expected a number, 1 or more, or auto, got -1"),
        (("--training",), "optimizer: expected the name of one, because the function returns none"),
        (("--training", "--optimizer", "sgd", "--host", "much"), "host: "),
        (("--training", "--optimizer", "sgd", "--master-weights"), "expected trained parameters in bfloat16"),
    ],
)
def test_options_that_exclude_each_other_are_named_both(planned: Planned, options: tuple[str, ...], said: str) -> None:
    code, _, err = planned("--batch", "4", "--hardware", "rtx-4090", *options)
    assert code == 2
    assert said in err


@pytest.mark.parametrize("options", [(), ("--training", "--optimizer", "sgd")])
def test_a_path_that_is_no_folder_is_refused_before_anything_is_planned(
    planned: Planned, options: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vdnn.cli.plan_command.find_function", lambda name: pytest.fail("it was planned"))
    (tmp_path / "a file").touch()
    code, _, err = planned("--batch", "4", "--hardware", "rtx-4090", *options, "--save", str(tmp_path / "a file"))
    assert code == 2
    assert "--save: expected a folder, got " in err


def test_a_host_that_is_too_small_is_said_in_one_sentence(planned: Planned) -> None:
    code, _, err = planned(
        *("--batch", "8", "--optimizer", "adamw", "--hardware", "rtx-4090", "--budget", "min", "--host", "16MiB")
    )
    assert code == 2
    assert "host: expected " in err
    assert "got 16.00 MiB, which would do for " in err


def test_batches_are_numbers() -> None:
    assert batches_of("1, 2,4") == [1, 2, 4]
    for text in ("0", "a", "1,,2", "-1"):
        with pytest.raises(ValueError, match="--batch: expected a number, 1 or more, got"):
            batches_of(text)
