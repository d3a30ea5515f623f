"""Links between Markdown files lead somewhere when they are read in the repository, without the site."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def pages(root: Path) -> list[Path]:
    rooms = (root / "docs", root / "vdnn")
    return [*sorted(root.glob("*.md")), *(page for room in rooms for page in sorted(room.rglob("*.md")))]


def places(page: Path) -> set[str]:
    """The fragments of the page's headings, as code hosts and the site make them."""
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in HEADING.findall(prose))
    return {heading.replace(" ", "-") for heading in headings}


def dead_links(root: Path) -> Iterator[str]:
    for page in pages(root):
        for address in LINK.findall(CODE.sub("`", page.read_text())):
            if re.match(r"https?://", address):
                continue
            path, _, fragment = address.partition("#")
            target = page.parent / path if path else page
            name = page.relative_to(root).as_posix()
            if not target.exists():
                yield f"{name}: {address} is not there"
            elif fragment and fragment not in places(target):
                yield f"{name}: {address} is no heading of that page"


def test_links_in_the_repository_lead_somewhere() -> None:
    assert len(pages(ROOT)) > 40
    assert list(dead_links(ROOT)) == []


def test_a_dead_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text(
        "# A page\n\n[a](docs/a.md#two-words) [b](docs/b.md) [c](#a-page) `[d](d.md)`\n"
    )
    (tmp_path / "docs" / "a.md").write_text("# Two words\n\n[up](../README.md#nowhere)\n")
    assert list(dead_links(tmp_path)) == [
        "README.md: docs/b.md is not there",
        "docs/a.md: ../README.md#nowhere is no heading of that page",
    ]
