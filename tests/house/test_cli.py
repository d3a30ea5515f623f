"""The command line: its commands, its output, and the meaning of each exit code."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from vdnn import __version__
from vdnn.cli import main as cli
from vdnn.cli.main import main
from vdnn.doctor import Sources, examine


@pytest.fixture
def bare_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A doctor that finds nothing, so that these tests do not look at hardware."""

    def nothing() -> None:
        raise ImportError("nothing here")

    sources = Sources(native_core=nothing, torch_version=nothing)  # type: ignore[arg-type]
    monkeypatch.setattr(cli, "examine", lambda: examine(sources))


@pytest.mark.usefixtures("bare_doctor")
def test_doctor_exits_with_0_where_everything_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out.startswith(f"vdnn {__version__}, Python ")


@pytest.mark.usefixtures("bare_doctor")
def test_doctor_json_is_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    assert capsys.readouterr().out.startswith('{\n  "format": 1,')


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    return capsys.readouterr().err.splitlines()


def helped(capsys: pytest.CaptureFixture[str], *command: str) -> list[str]:
    with pytest.raises(SystemExit) as stopped:
        main([*command, "--help"])
    assert stopped.value.code == 0
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["docter"], ["vdnn: there is no command 'docter': did you mean 'doctor'?", "Try `vdnn --help`."]),
        (["plan", "a:b", "--batches", "1"], ["vdnn plan: there is no option --batches: did you mean '--batch'?"]),
        (["plan", "a:b", "--xyzzy=1"], ["vdnn plan: there is no option --xyzzy", "Try `vdnn plan --help`."]),
        (["plan", "a:b"], ["vdnn plan: the following arguments are required: --batch"]),
        (["plan", "a:b", "c:d", "--batch", "1"], ["vdnn plan: unexpected arguments: c:d"]),
        (
            ["plan", "a:b", "--batch", "1", "--optimizer", "adm"],
            ["vdnn plan: argument --optimizer: expected one of sgd, momentum, adamw, got 'adm': did you mean 'adamw'?"],
        ),
        (["report"], ["vdnn report: the following arguments are required: RUN", "Try `vdnn report --help`."]),
    ],
)
def test_a_wrong_call_is_answered_in_two_lines_with_what_was_meant(
    arguments: list[str], said: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    lines = refused(capsys, *arguments)
    assert len(lines) == 2
    assert lines[: len(said)] == said


def test_a_command_that_is_like_none_is_answered_with_all_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    first = refused(capsys, "xyzzy")[0]
    assert first.startswith("vdnn: there is no command 'xyzzy'. There are: doctor, plan, report")


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_help_fits_the_window(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    for command in commands_of(capsys):
        lines = helped(capsys, command)
        examples = lines.index("examples:")
        # Usage lines are not wrapped, and below 50 columns there is no room for words beside the options.
        assert all(len(line) <= min(100, max(50, columns - 2)) for line in lines[1:examples] if not line[:1].isspace())
        assert max(map(len, lines[examples:])) <= 80, "examples stay as they are written, and fit 80 columns"


def commands_of(capsys: pytest.CaptureFixture[str]) -> list[str]:
    lines = helped(capsys)
    listed = lines[lines.index("commands:") + 1 : lines.index("options:") - 1]
    return [found.group(1) for line in listed if (found := re.match(r"  (\w+) ", line))]


def test_every_command_is_listed_and_shows_how_it_is_called(capsys: pytest.CaptureFixture[str]) -> None:
    commands = commands_of(capsys)
    assert {"doctor", "plan", "report"} <= set(commands)
    for command in commands:
        lines = helped(capsys, command)
        assert lines[0].startswith(f"usage: vdnn {command}")
        assert lines.index("options:") < lines.index("examples:")
        assert lines[lines.index("examples:") + 1].startswith(f"  vdnn {command}"), "an example of each"


def test_no_command_shows_the_help_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "what this machine has for vdnn" in capsys.readouterr().err


def test_version_is_the_package_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"vdnn {__version__}\n"


def test_it_is_called_by_the_name_that_was_typed(tmp_path: Path) -> None:
    script = tmp_path / "vdnn"  # as pip writes it for [project.scripts]
    script.write_text("import sys\nfrom vdnn.cli.main import main\nsys.exit(main())\n")
    root = Path(__file__).resolve().parents[2]
    for started, name in ([str(script)], "vdnn"), (["-m", "vdnn"], "python -m vdnn"):
        done = subprocess.run(
            [sys.executable, *started, "--help"],
            env={**os.environ, "PYTHONPATH": str(root)},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.startswith(f"usage: {name} COMMAND")
        assert f"  {name} doctor\n" in done.stdout


def test_an_interrupted_command_says_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "examine", interrupted)
    assert main(["doctor"]) == 130
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])
def test_a_reader_that_goes_away_is_no_fault(unbuffered: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command, environment = [sys.executable, "-m", "vdnn", "report", "--help"], {"PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, env={**os.environ, **environment})
    os.close(writing)
    assert done.stderr == b""
