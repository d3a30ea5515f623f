"""Every block of Python in the README and the docs runs as it stands, and so do the commands of ours that they show.

What a page shows runs from top to bottom, in one interpreter and one empty folder: a page may build on itself.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
OURS = ("python -m vdnn", "python -m benchmarks", "vdnn ")
# Measurements of minutes, which tests of their own run in a small size.
LONG = ("benchmarks.sweep", "plan_matrix", "max_batch")

# Given a list of ("python" or "command", text). A command is a module run as `python -m` runs it, but in the same
# process: importing torch takes longer than most of them.
DRIVER = """
import json, runpy, shlex, sys
shown = {"__name__": "__main__"}
for kind, text in json.loads(sys.argv[1]):
    if kind == "python":
        exec(compile(text, "a block of the page", "exec"), shown)
        continue
    words = shlex.split(text)
    words = words[2:] if words[0] == "python" else words
    sys.argv = words
    try:
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        if ended.code:
            print(f"{text}: exit code {ended.code}", file=sys.stderr)
            sys.exit(1)
"""


def steps_of(page: Path) -> list[tuple[str, str]]:
    """Blocks of Python, and the commands of ours in other blocks, in the page's order."""
    steps = []
    for language, text in BLOCK.findall(page.read_text()):
        if language == "python":
            steps.append(("python", text))
        elif language in ("", "sh", "bash"):
            steps += [("command", command) for command in _commands(text)]
    return steps


def _commands(block: str) -> list[str]:
    """Without comments. A line that is continued is one."""
    lines = [line.split("  #")[0].strip() for line in block.replace("\\\n", " ").splitlines()]
    return [line for line in lines if line.startswith(OURS) and not any(name in line for name in LONG)]


def named(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", [page for page in PAGES if steps_of(page)], ids=named)
def test_what_a_page_shows_runs(page: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", DRIVER, json.dumps(steps_of(page))]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def test_a_page_whose_code_is_wrong_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\nx = 1\n```\n\n```\nvdnn no-such-command  # this\nmake test\n```\n")
    assert steps_of(page) == [("python", "x = 1\n"), ("command", "vdnn no-such-command")]
    done = subprocess.run([sys.executable, "-c", DRIVER, json.dumps(steps_of(page))], cwd=ROOT, capture_output=True)
    assert b"vdnn no-such-command: exit code 2" in done.stderr


def test_pages_with_code_are_found() -> None:
    kinds = [kind for page in PAGES for kind, _ in steps_of(page)]
    assert kinds.count("python") > 5
    assert kinds.count("command") > 5
