"""Every block of Python in the README and the docs runs as it stands, and so do the commands of ours that they show.

The blocks of a page run in order in one fresh interpreter, from the root of the project: a page may build on itself.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
OURS = ("python -m vdnn", "python -m benchmarks", "vdnn ")
# Measurements of minutes, which tests of their own run in a small size.
LONG = ("benchmarks.sweep", "benchmarks.plans.plan_matrix", "benchmarks.plans.max_batch")


def blocks_of(page: Path, *languages: str) -> list[str]:
    return [text for language, text in BLOCK.findall(page.read_text()) if language in languages]


def commands_of(page: Path) -> list[str]:
    """Those of ours, without comments. A line that is continued is one."""
    lines = [
        line.split("  #")[0].strip()
        for block in blocks_of(page, "", "sh", "bash")
        for line in block.replace("\\\n", " ").splitlines()
    ]
    return [line for line in lines if line.startswith(OURS) and not any(name in line for name in LONG)]


def named(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def run(command: list[str], work: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(work)}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


@pytest.mark.parametrize("page", [page for page in PAGES if blocks_of(page, "python")], ids=named)
def test_the_python_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    program = "\n\n".join(blocks_of(page, "python"))
    path = tmp_path / "page.py"
    path.write_text(program)
    run([sys.executable, "-W", "error::DeprecationWarning:vdnn", str(path)], tmp_path)


@pytest.mark.parametrize(
    "command", sorted({command for page in PAGES for command in commands_of(page)}), ids=lambda command: command[:60]
)
def test_a_command_of_a_page_runs(command: str, tmp_path: Path) -> None:
    words = shlex.split(command)
    if words[0] == "vdnn":
        words = ["python", "-m", *words]
    run([sys.executable, *words[1:]], tmp_path)


def test_pages_with_code_are_found() -> None:
    assert any(blocks_of(page, "python") for page in PAGES)
    assert any(commands_of(page) for page in PAGES)
