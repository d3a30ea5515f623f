"""docs/design.md names every room that exists, and no other."""

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
