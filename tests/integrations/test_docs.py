"""Each row of the table in docs/integrations.md names tests that exist, and the page's quotations are found."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
DOCUMENT = (ROOT / "docs" / "integrations.md").read_text()
NAMED = re.compile(r"((?:\.\./(?:\w+/)+)?test_\w+\.py)::(test_\w+)")


def rows() -> list[str]:
    table = DOCUMENT.split("## What works with what")[1].split("\n## ")[0]
    return [line for line in table.splitlines() if line.startswith("| ")][1:]


def test_every_row_says_how_it_is_and_names_its_test() -> None:
    assert len(rows()) > 30
    for row in rows():
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert len(cells) == 4, row
        assert cells[1] in {"works", "note", "refused"}, row
        assert NAMED.fullmatch(cells[3]), row
        assert cells[2] or cells[1] == "works", row


def test_every_test_that_is_named_exists() -> None:
    missing = [
        f"{file}::{name}" for file, name in NAMED.findall(DOCUMENT) if f"def {name}(" not in (HERE / file).read_text()
    ]
    assert missing == []


def test_every_file_of_tests_is_named() -> None:
    named = {file for file, _ in NAMED.findall(DOCUMENT)}
    unnamed = (
        {path.name for path in HERE.glob("test_*.py")}
        - named
        - {"test_docs.py", "test_examples.py", "test_offload_arguments.py"}
    )
    assert unnamed == set()


def test_what_is_quoted_is_in_an_example() -> None:
    """Blocks that need a library quote lines of examples, which other tests run; other blocks are run from the page."""
    lines = {line.strip() for path in (ROOT / "examples").glob("*.py") for line in path.read_text().splitlines()}
    quoted = [
        line.strip() for block in re.findall(r"```py\n(.*?)```", DOCUMENT, re.DOTALL) for line in block.splitlines()
    ]
    assert quoted
    assert [line for line in quoted if line not in lines] == []
