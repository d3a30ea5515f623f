"""The command line: which commands there are, and what each exit code means."""

from __future__ import annotations

import pytest

from vdnn import __version__, cli
from vdnn.cli import main
from vdnn.doctor import Sources, examine


@pytest.fixture
def bare_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A doctor that finds nothing, so that these tests look at no hardware."""

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


def test_an_unknown_command_names_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["docter"])
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert "docter" in said
    assert "doctor" in said.replace("docter", "")


def test_no_command_shows_the_help_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "what this machine has for vdnn" in capsys.readouterr().err


def test_version_is_the_package_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"vdnn {__version__}\n"
