"""Rules of the tree: no names without meaning, ASCII text, settings that agree."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("vdnn", "csrc", "deferred", "tests", "benchmarks", "cmake")
# Such a file collects functions without a home. Their concept has no name yet: find it.
NAMELESS = re.compile(r"(^|_)(utils?|helpers?|common|misc|stuff|tools?)(_|$)")
SUFFIXES = {".py", ".pyi", ".h", ".cpp", ".cu", ".cuh", ".cmake"}


def sources(root: Path) -> Iterator[Path]:
    for room in ROOMS:
        for path in sorted((root / room).rglob("*")):
            if path.suffix in SUFFIXES and "results" not in path.parts:
                yield path


def nameless(root: Path) -> list[str]:
    parts = {(path, part) for path in sources(root) for part in path.relative_to(root).parts}
    return sorted(str(path) for path, part in parts if NAMELESS.search(part.split(".")[0]))


def not_ascii(root: Path) -> list[str]:
    return [str(path) for path in sources(root) if not path.read_bytes().isascii()]


def unintroduced(root: Path) -> list[str]:
    """Files that do not begin with a description."""
    openings = ('"""', "//", "#", 'r"""')
    return [str(path) for path in sources(root) if not path.read_text().startswith(openings)]


DETECTORS = {
    "nameless": (nameless, "vdnn/copy_utils.py", '"""What it is."""\n'),
    "not_ascii": (not_ascii, "tests/house/test_dash.py", '"""What it is \u2014 here."""\n'),
    "unintroduced": (unintroduced, "vdnn/silent.py", "import os\n"),
}


@pytest.mark.parametrize("name", sorted(DETECTORS))
def test_the_tree_is_clean(name: str) -> None:
    assert list(sources(ROOT))
    assert DETECTORS[name][0](ROOT) == []


@pytest.mark.parametrize("name", sorted(DETECTORS))
def test_the_detector_fires(name: str, tmp_path: Path) -> None:
    detector, path, text = DETECTORS[name]
    offender = tmp_path / path
    offender.parent.mkdir(parents=True)
    offender.write_text(text, encoding="utf-8")
    assert detector(tmp_path) == [str(offender)]


def test_the_readme_begins_with_the_two_commands_that_do_all_the_set_up() -> None:
    blocks = re.findall(r"^```text\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert re.findall(r"^(.+?) +#", blocks[0], re.MULTILINE) == ["make demo", "make test"]


def test_the_needed_torch_is_the_same_everywhere() -> None:
    from vdnn.requirements import NEEDED

    assert f'dependencies = ["{NEEDED}"]' in (ROOT / "pyproject.toml").read_text()


def test_every_command_of_the_makefile_is_in_its_help() -> None:
    text = (ROOT / "Makefile").read_text()
    shown = re.findall(r"make ([a-z-]+)", text.split("help:\n")[1].split("\n\n")[0])
    assert set(re.findall(r"^\.PHONY: (.+)$", text, re.MULTILINE)) == {*shown, "help"}


def test_results_are_tables_and_the_rows_that_pages_quote() -> None:
    """Programs can compute raw sweeps again."""
    sizes = {path.name: path.stat().st_size for path in (ROOT / "benchmarks/results").rglob("*") if path.is_file()}
    assert sizes
    assert {name: size for name, size in sizes.items() if size > 200_000} == {}


def test_no_docstring_opens_with_a_fragment() -> None:
    """`Of one session.` says nothing: a docstring opens with a sentence or names what the object is."""
    fragment = re.compile(r"(Of|By|Where|Whether|What)\b")
    found = []
    for path in [
        path for folder in ("vdnn", "benchmarks", "deferred", "tests") for path in (ROOT / folder).rglob("*.py")
    ]:
        text = path.read_text()
        if not re.search(rf'"""\s*{fragment.pattern}', text):
            continue  # to parse them all takes seconds
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                docstring = ast.get_docstring(node)
                if docstring and fragment.match(docstring):
                    found.append(f"{path.relative_to(ROOT)}: {docstring.splitlines()[0]}")
    assert found == []


def test_no_invariant_is_a_bare_assert() -> None:
    """python -O removes them."""
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in (ROOT / "vdnn").rglob("*.py")
        if re.search(r"^\s*assert\b", text := path.read_text(), re.MULTILINE)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Assert)
    ]
    assert found == []


def names_of_several_classes(root: Path) -> dict[str, list[str]]:
    """The names of classes that several modules of the package define, the native core's among them."""
    homes: dict[str, list[str]] = {}
    for path in [*sorted((root / "vdnn").rglob("*.py")), *(root / "vdnn").glob("_C.pyi")]:
        for name in re.findall(r"^ *class (\w+)", path.read_text(), re.MULTILINE):
            homes.setdefault(name, []).append(path.relative_to(root).as_posix())
    assert homes
    return {name: paths for name, paths in homes.items() if len(paths) > 1}


def test_a_name_belongs_to_one_class() -> None:
    assert names_of_several_classes(ROOT) == {}


def test_a_name_that_two_classes_share_is_found(tmp_path: Path) -> None:
    table = "class _Cell:\n    class Row: ...\n"
    for path, text in {"report/table.py": table, "page.py": "class Row:\n", "_C.pyi": "class _Cell: ...\n"}.items():
        (tmp_path / "vdnn" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "vdnn" / path).write_text(text)
    found = {"_Cell": ["vdnn/report/table.py", "vdnn/_C.pyi"], "Row": ["vdnn/page.py", "vdnn/report/table.py"]}
    assert names_of_several_classes(tmp_path) == found


def test_a_named_tuple_has_no_other_base() -> None:
    """Python 3.10 refuses a generic one at its import."""
    found = [
        f"{path.relative_to(ROOT)}: {node.name}"
        for folder in ("vdnn", "benchmarks", "tests", "examples")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef) and "NamedTuple" in map(ast.unparse, node.bases) and len(node.bases) > 1
    ]
    assert found == []
