"""Each sentence in double quotes in docs/troubleshooting.md is a message of vdnn: a string of the package contains it.

"..." in a quotation stands for a variable part. The parts around it have to occur in one string, in this order.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"
# The variable part of a string in the source.
HOLE = "\0"
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.MULTILINE | re.DOTALL)


def quotations(text: str) -> list[str]:
    """Returns the quotations outside of code, where double quotes belong to Python."""
    prose = CODE.sub("`", text)
    return [" ".join(quoted.split()) for quoted in re.findall(r'"([^"]+)"', prose) if quoted != "..."]


def strings_of(package: Path) -> Iterator[str]:
    """Yields every string of the package that is not a docstring, with Python's implicit joins."""
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                yield "".join(str(part.value) if isinstance(part, ast.Constant) else HOLE for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield re.sub(r"%[sdg]|%\.\d+[fg]", HOLE, node.value)


def is_said(quoted: str, strings: list[str]) -> bool:
    """Says whether one string contains all parts of the quotation, in order, with anything in between."""
    parts = [re.escape(part) for part in re.split(r"\s*\.\.\.\s*", quoted.strip()) if part.strip(" ,;:.()")]
    pattern = re.compile(".*".join(parts), re.DOTALL)
    return any(pattern.search(string) for string in strings)


def unsaid(text: str, package: Path) -> list[str]:
    strings = list(dict.fromkeys(strings_of(package)))
    return [quoted for quoted in quotations(text) if not is_said(quoted, strings)]


def test_every_quoted_message_is_one_of_the_code() -> None:
    assert len(quotations(PAGE.read_text())) > 30
    assert unsaid(PAGE.read_text(), ROOT / "vdnn") == []


def test_a_message_that_nobody_says_is_found() -> None:
    text = 'It says "offloading cannot lower the speed of ...", and `"code"`, and\n"kept ... saves,\n...".'
    assert quotations(text) == ["offloading cannot lower the speed of ...", "kept ... saves, ..."]
    assert unsaid(text, ROOT / "vdnn" / "runtime") == ["offloading cannot lower the speed of ..."]
