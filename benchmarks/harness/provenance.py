"""The sources of results: versions of the programs that ran, and the commit of this tree."""

from __future__ import annotations

import platform
import subprocess
from functools import cache
from importlib import metadata
from pathlib import Path

import torch

import vdnn

_ROOT = Path(__file__).resolve().parents[2]


def versions_of(package: str | None = None) -> dict[str, str]:
    """The versions of Python, torch, vdnn, and of `package`, which is the package of a peer."""
    found = {"python": platform.python_version(), "torch": torch.__version__, "vdnn": vdnn.__version__}
    if package is not None:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


@cache
def commit_of_tree() -> str | None:
    """The commit, with "-changed" if files differ from it. None without git or without a repository."""
    commit = _git("rev-parse", "HEAD")
    if commit is None:
        return None
    return f"{commit}-changed" if _git("status", "--porcelain", "--untracked-files=no") else commit


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(_ROOT), *arguments], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
