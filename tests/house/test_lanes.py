"""The commit hooks, `make lint` and the hosted workflows agree with each other and with the package's metadata."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = (ROOT / "pyproject.toml").read_text()
WORKFLOWS = ROOT / ".github" / "workflows"
HOOK = re.compile(r"entry: \.venv/bin/python (.+)")


def recipe_of(target: str) -> list[str]:
    """The lines that make runs for the target."""
    found = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert found is not None
    return [line.strip() for line in found[1].splitlines()]


def not_in_hooks(hooks: str) -> list[str]:
    """Tools of `make lint-quick` that no hook runs. The ruff format hook rewrites files, while lint only checks
    them."""
    entries = [entry.removesuffix(" --dry-run -Werror") for entry in HOOK.findall(hooks)]
    commands = [line.replace(" --check", "").removesuffix(" .") for line in recipe_of("lint-quick")]
    tools = [re.split(r"\$\(PY\) ", command)[-1].removesuffix(" --dry-run -Werror") for command in commands]
    return [tool for tool in tools if tool not in entries]


def test_the_hooks_run_what_lint_runs() -> None:
    assert len(recipe_of("lint-quick")) == 4
    assert not_in_hooks((ROOT / ".pre-commit-config.yaml").read_text()) == []


def test_a_tool_without_a_hook_is_found() -> None:
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    assert not_in_hooks(hooks.replace("-m mypy", "-m pyright")) == ["-m mypy"]


def test_lint_never_reads_transformers_or_lightning() -> None:
    """Lint therefore passes with and without them."""
    skipped = re.search(r"module = \[([^\]]*)\]\nignore_missing_imports = true\nfollow_imports = \"skip\"", PROJECT)
    assert skipped is not None
    assert {'"lightning.*"', '"transformers.*"'} <= set(skipped[1].split(", "))
    lint = re.search(r"^lint = \[(.+)\]$", PROJECT, re.MULTILINE)
    assert lint is not None
    assert set(re.findall(r'"([\w-]+)==', lint[1])) == {"clang-format", "clang-tidy", "mypy", "ruff"}


def test_the_full_lane_has_every_python_of_the_metadata() -> None:
    found = re.search(r"python: \[(.+)\]", (WORKFLOWS / "everything.yml").read_text())
    assert found is not None
    assert re.findall(r'"3\.(\d+)"', found[1]) == re.findall(r"Python :: 3\.(\d+)", PROJECT)


@pytest.mark.parametrize("workflow", ["pull-request", "everything", "release"])
def test_what_a_workflow_runs_is_there(workflow: str) -> None:
    text = (WORKFLOWS / f"{workflow}.yml").read_text()
    targets = set(re.findall(r"^\.PHONY: (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"run: make ([\w-]+)", text)) <= targets
    assert all((ROOT / path).is_file() for path in re.findall(r"run: (?:bash|python) (?!-)(\.?[\w./-]+)", text))


def test_the_night_runs_what_no_other_lane_has_time_for() -> None:
    found = re.search(r"target: \[(.+)\]", (WORKFLOWS / "everything.yml").read_text())
    assert found is not None
    assert found[1].split(", ") == ["test-full", "stress-deferred", "fuzz"]
    assert all(recipe_of(target) for target in found[1].split(", "))


def test_the_night_has_the_lowest_and_the_newest_torch_of_the_readme() -> None:
    promised = re.search(r"promises torch (2\.\d+) to (2\.\d+)", (ROOT / "README.md").read_text())
    lane = re.search(r"torch: \[(.+)\]", (WORKFLOWS / "everything.yml").read_text())
    assert promised is not None
    assert lane is not None
    assert re.findall(r'"(2\.\d+)\.\d+"', lane[1]) == list(promised.groups())
    assert f'dependencies = ["torch>={promised[1]}"]' in PROJECT


def test_pull_requests_have_eight_minutes() -> None:
    text = (WORKFLOWS / "pull-request.yml").read_text()
    assert set(re.findall(r"timeout-minutes: (\d+)", text)) == {"8"}
    assert {"make lint-quick", "make test-fast"} <= set(re.findall(r"run: (make [\w-]+)", text))
