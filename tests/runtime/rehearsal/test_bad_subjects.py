"""Subjects that cannot be planned: a few lines say what was being done, at which line, and what to do."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from vdnn.cli.main import main

HEAD = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(512, 512)

    def forward(self, x):
        return self.inner(x).tanh()

def rows(batch):
    return torch.randn(batch, 512)
"""

# The body of a file with `build`, and what is said. The last line of HEAD is 13.
SUBJECTS: dict[str, tuple[str, str]] = {
    "returns nothing": ("def build(batch):\n    Net()", "but it returned None."),
    "returns a model": ("def build(batch):\n    return Net()", "returned a model, a Net, without its inputs."),
    "returns inputs first": (
        "def build(batch):\n    return rows(batch), Net()",
        "but it returned a tuple of 2 (FakeTensor, Net).",
    ),
    "returns five": (
        "def build(batch):\n    return Net(), rows(batch), 1, 2, 3",
        "but it returned a tuple of 5 (Net, FakeTensor, int, int, int).",
    ),
    "returns a number as its loss": (
        "def build(batch):\n    return Net(), rows(batch), 3",
        "where the loss is a function of the model's output",
    ),
    "returns no tensor": ("def build(batch):\n    return Net(), 'rows'", "expected inputs with a tensor, got a str."),
    "an empty loader": (
        "def build(batch):\n    return Net(), iter(())",
        "a loader with a batch at least, got an empty",
    ),
    "a loader that raises": (
        "def batches():\n    raise KeyError('train')\n    yield\ndef build(batch):\n    return Net(), batches()",
        "taking the first batch of the loader failed: KeyError: 'train'\n  at ",
    ),
    "raises": (
        "def build(batch):\n    return [][1]",
        "calling build(8) failed: IndexError: list index out of range\n  at ",
    ),
    "takes no batch": (
        "def build():\n    return Net(), rows(8)",
        "The function is called with one number, the batch size.",
    ),
    "a program": (
        "def build(config, steps):\n    for _ in range(steps):\n        pass",
        "write a function that returns its model and inputs, or an object with `model` and `step()`.",
    ),
    "a missing module": ("import no_such_library\ndef build(batch): ...", "ModuleNotFoundError: No module named"),
    "a file that raises": (
        "raise RuntimeError('no dataset')\ndef build(batch): ...",
        "importing subject failed: RuntimeError: no dataset\n  at ",
    ),
    "a file that is no Python": ("def build(batch:", "importing subject failed: SyntaxError: "),
    "weights to download": (
        "def build(batch):\n    raise OSError('cannot connect to huggingface.co')",
        "A rehearsal needs no weights: make the model from its configuration.",
    ),
    "the model raises": (
        "class Bad(Net):\n    def forward(self, x):\n        return self.outer(x)\n"
        "def build(batch):\n    return Bad(), rows(batch)",
        "calling the model failed: AttributeError: 'Bad' object has no attribute 'outer'\n",
    ),
    "shapes that differ": (
        "def build(batch):\n    return Net(), torch.randn(batch, 3)",
        "calling the model failed: RuntimeError: ",
    ),
    "arguments that differ": (
        "def build(batch):\n    return Net(), {'images': rows(batch)}",
        "calling the model failed: TypeError: ",
    ),
    "the model returns text": (
        "class Text(Net):\n    def forward(self, x):\n        return 'done'\n"
        "def build(batch):\n    return Text(), rows(batch)",
        "expected the model to return a tensor or an output with `loss`, got a str.",
    ),
    "a loss that raises": (
        "def build(batch):\n    return Net(), rows(batch), lambda out: out.loss",
        "computing the loss failed: ",
    ),
    "a loss that is a number": (
        "def build(batch):\n    return Net(), rows(batch), lambda out: 1.0",
        "the loss must be a tensor of one number, but it is a float.",
    ),
    "a loss for each sample": (
        "def build(batch):\n    return Net(), rows(batch), lambda out: out.mean(1)",
        "but its shape is [8]. Take its mean or its sum.",
    ),
    "a loss without grad": (
        "def build(batch):\n    return Net().requires_grad_(False), rows(batch)",
        "the loss does not require grad, so there is no backward pass to plan.",
    ),
    "a detached loss": (
        "def build(batch):\n    return Net(), rows(batch), lambda out: out.detach().mean()",
        "its forward may run under torch.no_grad() or detach its output.",
    ),
    "a NaN batch": (
        "def build(batch):\n    return Net(), torch.full((batch, 512), float('nan'))",
        "expected a batch of numbers, got NaN in it.",
    ),
    "a step that raises": (
        "class Train:\n    def __init__(self, batch):\n        self.model = Net()\n"
        "    def step(self):\n        raise StopIteration('no more batches')\nbuild = Train",
        "running step() failed: StopIteration: no more batches\n  at ",
    ),
    "a step that exits": (
        "class Train:\n    def __init__(self, batch):\n        self.model = Net()\n"
        "    def step(self):\n        raise SystemExit('done')\nbuild = Train",
        "running step() failed: SystemExit: done\n  at ",
    ),
    "a step that is no function": (
        "class Train:\n    def __init__(self, batch):\n        self.model, self.step = Net(), 3\nbuild = Train",
        "`step` must be a method, got int.",
    ),
    "a library of CUDA": (
        "def build(batch):\n    model = Net()\n    torch.cuda.get_device_properties(0)\n    return model, rows(batch)",
        "A rehearsal has no GPU: ",
    ),
    "a size that data decides": (
        "class Unique(Net):\n    def forward(self, x):\n        return super().forward(x.unique(dim=0))\n"
        "def build(batch):\n    return Unique(), rows(batch)",
        "The result of this operation depends on data, and a rehearsal has none.",
    ),
    "no function of that name": ("def built(batch): ...", "has no 'build': did you mean 'built'?"),
    "an object in place of a function": (
        "build = 3",
        "expected a function of a batch size, got an object of type int.",
    ),
}
OPTIONS: dict[str, tuple[tuple[str, ...], int, str]] = {
    "an unknown card": (("--hardware", "abacus"), 2, "hardware profile: expected one of a100-40"),
    "a budget below": (("--budget", "1KiB"), 1, "budget 1.00 KiB cannot be met: "),
    "a budget above the card": (("--budget", "500GiB"), 2, "budget: 500.00 GiB is more than the device has"),
    "a budget that is no size": (("--budget", "lots"), 2, "budget: expected a size"),
    "a batch of nothing": (("--batch", "0"), 2, "--batch: expected a number, 1 or more, got 0."),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    yield tmp_path
    sys.modules.pop("subject", None)


def said_of(folder: Path, body: str, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str]:
    (folder / "subject.py").write_text(HEAD + textwrap.dedent(body) + "\n")
    arguments = ["subject.py:build", "--batch", "8", "--min-bytes", "1", "--no-bound", *options]
    sys.modules.pop("subject", None)
    code = main(["plan", *arguments])
    found = capsys.readouterr()
    assert found.out == "" or not code
    return code, found.err


@pytest.mark.parametrize("name", SUBJECTS)
def test_a_subject_that_cannot_be_planned_is_answered_in_a_few_lines(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body, expected = SUBJECTS[name]
    code, said = said_of(folder, body, capsys)
    assert code == 2
    assert said.startswith("vdnn plan: ")
    assert expected in said
    assert "Traceback" not in said
    assert len(said.splitlines()) <= 5
    if "\n  at " in expected:
        assert str(folder / "subject.py") in said


@pytest.mark.parametrize("name", OPTIONS)
def test_options_that_cannot_be_met(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options, expected_code, expected = OPTIONS[name]
    code, said = said_of(folder, "def build(batch):\n    return Net(), rows(batch)", capsys, *options)
    assert code == expected_code
    assert expected in said


def test_a_budget_above_what_is_needed_keeps_everything(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "subject.py").write_text(HEAD + "def build(batch):\n    return Net(), rows(batch)\n")
    assert main(["plan", "subject.py:build", "--batch", "4096", "--budget", "80%", "--no-bound"]) == 0
    assert "  note: keep everything: it fits, in " in capsys.readouterr().out


def test_the_traceback_is_shown_where_it_is_asked_for(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    body = SUBJECTS["raises"][0]
    short, long = said_of(folder, body, capsys)[1], said_of(folder, body, capsys, "--traceback")[1]
    assert "--traceback shows all lines." in short
    assert "Traceback (most recent call last):" in long
    assert "return [][1]" in long
    assert long.splitlines()[-1].startswith("  Run the step once")


@pytest.mark.parametrize("name", ["raises", "takes no batch", "the model raises", "a loss without grad", "raises late"])
def test_advise_answers_the_same(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    late = "class Bad(Net):\n    def forward(self, x):\n        raise KeyError('late')\n"
    late += "def build(batch):\n    return Bad(), rows(batch)"
    (folder / "subject.py").write_text(HEAD + SUBJECTS.get(name, (late, ""))[0] + "\n")
    assert main(["advise", "subject.py:build", "--batch", "8", "--hardware", "h100"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("vdnn advise: ")
    assert "Traceback" not in said
    assert len(said.splitlines()) <= 5
