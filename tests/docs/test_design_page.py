"""docs/design.md names every room, walks a saved tensor through files that exist, and answers by functions."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "design.md").read_text()
# The page does not describe the code between the native core and Python.
GLUE = {"bindings"}


def rooms(package: str) -> set[str]:
    """The folders with sources in them. A build leaves other folders."""
    folders = [folder for folder in (ROOT / package).iterdir() if folder.is_dir()]
    return {folder.name for folder in folders if any(folder.glob("*.py")) or any(folder.glob("*.cpp"))}


def unnamed(text: str) -> set[str]:
    block = text.split("## Rooms")[1].split("```")[1]
    named = set(re.findall(r"\w+", block))
    return (rooms("vdnn") | rooms("csrc")) - named - GLUE


def test_every_room_is_in_the_design() -> None:
    assert {"planning", "runtime", "transfer"} <= rooms("vdnn") | rooms("csrc")
    assert unnamed(TEXT) == set()


def test_a_room_that_is_not_in_the_design_is_found() -> None:
    assert unnamed(TEXT.replace("advisor/", "")) == {"advisor"}


MOST_HOPS = 12
PATH = re.compile(r"`((?:vdnn|csrc|tests)/[\w/.]+\.(?:py|cpp|h))`")
# "`keep` and `unpack_kept` in `csrc/hooks/gate.cpp`"; a second "in" has the same functions.
NAMED = re.compile(
    r"((?:`\w+`(?:, | and )?)+) in (`[\w/.]+`)(?: or in (`[\w/.]+`)|[^|;]*?; under a plan in (`[\w/.]+`))?"
)


def section(heading: str) -> str:
    return TEXT.split(f"## {heading}")[1].split("\n## ")[0]


def answers(text: str) -> list[tuple[str, str]]:
    """Each function with the file that has to define it."""
    found = []
    for names, *paths in NAMED.findall(text):
        found += [(name, path.strip("`")) for path in paths if path for name in re.findall(r"`(\w+)`", names)]
    return found


def is_defined(name: str, path: Path) -> bool:
    text = path.read_text()
    if path.suffix == ".py":
        return re.search(rf"^ *def {name}\(", text, re.MULTILINE) is not None
    return re.search(rf"^[\w:<>*& ]+[ *&]{name}\(", text, re.MULTILINE) is not None


def test_the_walk_of_a_saved_tensor_has_at_most_twelve_hops_through_files_that_exist() -> None:
    walk = section("The walk of one saved tensor")
    hops = re.findall(r"^(\d+)\. ", walk, re.MULTILINE)
    assert [int(hop) for hop in hops] == list(range(1, len(hops) + 1))
    assert 8 <= len(hops) <= MOST_HOPS
    assert [path for path in PATH.findall(walk) if not (ROOT / path).is_file()] == []


def test_ten_questions_are_answered_by_functions_that_exist() -> None:
    asked = section("Ten questions about the code")
    assert len(re.findall(r"^\| [A-Z][^|]+\? \|", asked, re.MULTILINE)) == 10
    found = answers(asked)
    assert len(found) >= 20
    assert [(name, path) for name, path in found if not is_defined(name, ROOT / path)] == []


def test_an_answer_that_names_no_function_of_its_file_is_found() -> None:
    text = "| Who? | `choose` and `nobody` in `vdnn/runtime/steps/plan_book.py` |"
    assert [is_defined(name, ROOT / path) for name, path in answers(text)] == [True, False]
