"""The index of decisions lists every page once, and whoever names a decision names one that has a page."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
INDEX = "README.md"
# "decisions/0026", "decision 26", "page 26": as prose, comments and links write them. "0056, 0066" names two.
NAMED = re.compile(r"decisions/(\d{4}(?:, \d{4})*)|\b[Dd]ecisions? \[?(\d+(?:(?:, | and )\d+)*)")
PAGE_IN_DECISIONS = re.compile(r"\b[Pp]ages? (\d+)")
MERGED = re.compile(r"^\| (\d+(?:, \d+)*), [^|]+ \| (\d+) \|$", re.MULTILINE)
SOURCES = ("csrc", "vdnn", "tests", "benchmarks", "examples", "docs")
ENDINGS = {".py", ".pyi", ".cpp", ".h", ".cu", ".md", ".toml", ".txt"}


def numbers(root: Path) -> set[int]:
    return {int(page.name[:4]) for page in (root / "docs" / "decisions").glob("0*.md")}


def merged(root: Path) -> dict[int, int]:
    """The numbers whose pages were merged, each with the page that has them now."""
    index = (root / "docs" / "decisions" / INDEX).read_text()
    return {int(old): int(page) for olds, page in MERGED.findall(index) for old in olds.split(", ")}


def files(root: Path) -> Iterator[Path]:
    yield from (path for path in sorted(root.iterdir()) if path.suffix in ENDINGS)
    for room in SOURCES:
        yield from (path for path in sorted((root / room).rglob("*")) if path.suffix in ENDINGS and path.is_file())


def stale(root: Path) -> Iterator[str]:
    """Each mention of a decision without a page. A page may name, as its history, what was merged into it."""
    known, old = numbers(root), merged(root)
    for path in files(root):
        if path == root / "docs" / "decisions" / INDEX or path.name == "test_decisions.py":
            continue
        is_decision = path.parent.name == "decisions"
        for line, text in enumerate(path.read_text(errors="replace").splitlines(), 1):
            found = [one or other for one, other in NAMED.findall(text)]
            found += PAGE_IN_DECISIONS.findall(text) if is_decision else []
            history = is_decision and text.startswith("**History.**")
            for number in (int(one) for group in found for one in re.findall(r"\d+", group)):
                allowed = history and old.get(number) == int(path.name[:4] if is_decision else 0)
                if number not in known and not allowed:
                    yield f"{path.relative_to(root).as_posix()}:{line}: decision {number}"


def test_the_index_lists_every_decision_once_and_says_what_it_decides() -> None:
    index = (ROOT / "docs" / "decisions" / INDEX).read_text()
    listed = re.findall(r"^\* \[(\d+)\]\((\d{4})-[^)]+\): (.+)$", index, re.MULTILINE)
    assert sorted(int(number) for number, _, _ in listed) == sorted(numbers(ROOT))
    assert all(int(number) == int(name) for number, name, _ in listed)
    assert all(says.endswith(".") for _, _, says in listed)


def test_a_merged_number_has_no_page_and_leads_to_one() -> None:
    assert not set(merged(ROOT)) & numbers(ROOT)
    assert set(merged(ROOT).values()) <= numbers(ROOT)
    assert merged(ROOT)[41] == 36


def test_whoever_names_a_decision_names_one_that_has_a_page() -> None:
    assert list(stale(ROOT)) == []


def test_no_page_says_that_another_one_amends_it() -> None:
    pages = sorted((ROOT / "docs" / "decisions").glob("0*.md"))
    assert [page.name for page in pages if re.search(r"\b(amend|supersede)", page.read_text(), re.IGNORECASE)] == []


def test_a_stale_number_is_found(tmp_path: Path) -> None:
    decisions = tmp_path / "docs" / "decisions"
    decisions.mkdir(parents=True)
    (decisions / INDEX).write_text("* [2](0002-b.md): B.\n\n| 1, the first | 2 |\n")
    (decisions / "0002-b.md").write_text(
        "# 2. B\n\nAs on page 1.\n\n**History.** Page 1 and decision 1 are merged here.\n"
    )
    (tmp_path / "vdnn").mkdir()
    (tmp_path / "vdnn" / "a.py").write_text('"""See docs/decisions/0001, and decisions 2 and 7."""\n')
    assert sorted(stale(tmp_path)) == [
        "docs/decisions/0002-b.md:3: decision 1",
        "vdnn/a.py:1: decision 1",
        "vdnn/a.py:1: decision 7",
    ]
