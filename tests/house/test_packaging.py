"""Statements of pyproject.toml, CITATION.cff and the report forms agree with the package and with each other."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import vdnn

if sys.version_info >= (3, 11):
    import tomllib
else:  # pytest depends on tomli there
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]
FOR_USERS = ("plan", "report", "hf", "lightning")


def test_the_version_stands_in_one_place() -> None:
    assert "version" not in PROJECT["project"]
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "vdnn.version.__version__"}
    number = re.escape(vdnn.__version__)
    files = [*(ROOT / "vdnn").rglob("*.py"), ROOT / "setup.py", ROOT / "CMakeLists.txt", ROOT / "pyproject.toml"]
    assert [path for path in files if re.search(number, path.read_text())] == [ROOT / "vdnn" / "version.py"]


def test_who_cites_it_cites_this_version() -> None:
    text = (ROOT / "CITATION.cff").read_text()
    found = dict(re.findall(r"^([a-z-]+): (.+)$", text, re.MULTILINE))
    assert found["version"] == vdnn.__version__
    assert found["license"] == PROJECT["project"]["license"]
    assert set(found) >= {"cff-version", "message", "title"}, "what the format asks for, besides authors"
    assert f"authors:\n  - name: {PROJECT['project']['authors'][0]['name']}\n" in text


def test_the_changelog_begins_with_this_version() -> None:
    heading = re.search(r"^## (\S+?),? ", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert heading is not None
    assert heading.group(1) == vdnn.__version__


def test_torch_is_all_that_running_needs() -> None:
    assert [re.split(r"[<>=]", one)[0] for one in PROJECT["project"]["dependencies"]] == ["torch"]


@pytest.mark.parametrize("extra", FOR_USERS)
def test_what_a_user_adds_can_stand_beside_other_packages(extra: str) -> None:
    assert EXTRAS[extra]
    assert [one for one in EXTRAS[extra] if not re.fullmatch(r"[a-z]+>=[\d.]+", one)] == []


def test_dev_is_every_extra_but_the_libraries_of_others() -> None:
    (all_of_them,) = EXTRAS["dev"]
    named = set(re.fullmatch(r"vdnn\[([\w,]+)\]", all_of_them)[1].split(","))  # type: ignore[index]
    assert named == set(EXTRAS) - {"dev", "hf", "lightning"}


def test_every_extra_that_a_message_names_exists() -> None:
    text = "".join(path.read_text() for room in ("vdnn", "docs") for path in (ROOT / room).rglob("*.[pm][yd]"))
    named = set(re.findall(r"vdnn\[(\w+)\]", text + (ROOT / "README.md").read_text()))
    assert named
    assert named <= set(EXTRAS)


def test_wheels_are_built_for_every_python_that_the_metadata_names() -> None:
    named = re.findall(r"Python :: 3\.(\d+)", "\n".join(PROJECT["project"]["classifiers"]))
    built = re.findall(r"cp3(\d+)-", "\n".join(PROJECT["tool"]["cibuildwheel"]["build"]))
    assert set(named) <= set(built)
    assert PROJECT["project"]["requires-python"] == f">=3.{min(map(int, named))}"


def test_type_information_goes_with_the_package() -> None:
    assert {"_C.pyi", "py.typed"} <= set(PROJECT["tool"]["setuptools"]["package-data"]["vdnn"])
    assert all((ROOT / "vdnn" / name).is_file() for name in ("_C.pyi", "py.typed"))


@pytest.mark.parametrize("form", ["bug", "performance"])
def test_a_report_is_asked_for_what_the_tools_say(form: str) -> None:
    text = (ROOT / ".github" / "ISSUE_TEMPLATE" / f"{form}.yml").read_text()
    assert "vdnn doctor --json" in text
    assert "session.report()" in text


def test_packages_are_lent_with_all_that_they_need(tmp_path: Path) -> None:
    lender = Path(__file__).with_name("lent_packages.py")
    done = subprocess.run([sys.executable, str(lender), str(tmp_path), "pytest"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    alone = [sys.executable, "-S", "-c", "import pytest; print(pytest.__file__)"]  # -S: without site packages
    assert subprocess.run(alone, capture_output=True, env={}, cwd=ROOT / "docs").returncode == 1
    found = subprocess.run(alone, capture_output=True, text=True, env={"PYTHONPATH": str(tmp_path)}, cwd=ROOT / "docs")
    assert found.stdout.startswith(str(tmp_path)), found.stderr
    missing = subprocess.run([sys.executable, str(lender), str(tmp_path), "no-such"], capture_output=True, text=True)
    assert missing.returncode == 1
    assert "no-such is not installed" in missing.stderr
