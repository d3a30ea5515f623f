"""Every block of Python in the README and the docs runs as written, and so do the vdnn commands that they show.

The blocks of a page run from top to bottom, in one process (tests/forked.py) and one empty folder, so later blocks may
use earlier ones. A block of Python that begins with the comment "# NAME.py" is also written to that file. A block
marked "output" is what the page prints.
"""

from __future__ import annotations

import importlib
import re
import runpy
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import forked

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```([\w{}-]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
OURS = ("python -m vdnn", "python -m benchmarks", "vdnn ")
# Measurements that take minutes. Other tests run them in a small size.
LONG = ("benchmarks.sweep", "plan_matrix", "max_batch")
# Elapsed seconds, which depend on the machine that wrote the page.
SECONDS = re.compile(r" *\b\d+\.\d\d s\b")


def follow(steps: list[tuple[str, str]]) -> None:
    """Runs the steps in this process. A command is a module run as `python -m` runs it, but in the same process,
    because importing torch takes longer than most commands.
    """
    shown: dict[str, Any] = {"__name__": "__main__"}
    for kind, text in steps:
        if kind == "python":
            if named := re.match("# (.+)[.]py\n", text):
                Path(named[1] + ".py").write_text(text)
                module = importlib.import_module(named[1])
                shown.update({name: value for name, value in vars(module).items() if not name.startswith("__")})
                continue
            exec(compile(text, "a block of the page", "exec"), shown)
            continue
        words = shlex.split(text)
        sys.argv = words[2:] if words[0] == "python" else words
        try:
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        except SystemExit as ended:
            if ended.code:
                print(f"{text}: exit code {ended.code}", file=sys.stderr)
                sys.exit(1)


def steps_of(page: Path) -> list[tuple[str, str]]:
    """Returns the blocks of Python, and the vdnn commands in other blocks, in the page's order."""
    steps = []
    for language, text in BLOCK.findall(page.read_text()):
        if language == "python":
            steps.append(("python", text))
        elif language in ("", "sh", "bash"):
            steps += [("command", command) for command in _commands(text)]
    return steps


def _commands(block: str) -> list[str]:
    """Returns the commands without comments, with continued lines joined."""
    lines = [line.split("  #")[0].strip() for line in block.replace("\\\n", " ").splitlines()]
    return [line for line in lines if line.startswith(OURS) and not any(name in line for name in LONG)]


def not_printed(page: Path, printed: str) -> list[str]:
    """Returns the output blocks that the page's code did not print, ignoring elapsed seconds."""
    printed = SECONDS.sub(" 0 s", printed)
    shown = [text for language, text in BLOCK.findall(page.read_text()) if language == "output"]
    return [text for text in shown if SECONDS.sub(" 0 s", text) not in printed]


def named(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", [page for page in PAGES if steps_of(page)], ids=named)
def test_what_a_page_shows_runs(page: Path, tmp_path: Path) -> None:
    done = forked.run(follow, steps_of(page), folder=tmp_path, environment={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert not_printed(page, done.stdout) == [], done.stdout


def test_a_block_that_names_a_file_is_that_file(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\n# mine.py\nx = 1\n```\n\n```python\nimport mine\nprint(mine.x + x, 'in 0.31 s')\n```\n")
    done = forked.run(follow, steps_of(page), folder=tmp_path)
    assert done.stdout == "2 in 0.31 s\n"


def test_output_that_a_page_does_not_print_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```output\n2 in 1.25 s\n```\n\n```output\n3\n```\n")
    assert not_printed(page, "1\n2 in 0.31 s\n") == ["3\n"]


def test_a_page_whose_code_is_wrong_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\nx = 1\n```\n\n```\nvdnn no-such-command  # this\nmake test\n```\n")
    assert steps_of(page) == [("python", "x = 1\n"), ("command", "vdnn no-such-command")]
    done = forked.run(follow, steps_of(page), folder=tmp_path)
    assert done.returncode == 1
    assert "vdnn no-such-command: exit code 2" in done.stderr


def test_pages_with_code_are_found() -> None:
    kinds = [kind for page in PAGES for kind, _ in steps_of(page)]
    assert kinds.count("python") > 5
    assert kinds.count("command") > 5
