"""Runs a python in which `import torch` fails as if torch were not installed, although this environment has it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.patience import run_to_its_end

ROOT = Path(__file__).resolve().parents[2]

# Every python that has this directory on PYTHONPATH imports it before any program runs. A sitecustomize of the
# environment itself, if there is one, is not imported in these processes.
_BLOCKER = """
import sys

class TorchBlocker:
    def find_spec(self, name, path=None, target=None):
        if name == "torch" or name.startswith("torch."):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None

sys.meta_path.insert(0, TorchBlocker())
"""


def python_without_torch(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`python <arguments>` that can import the checkout but not torch. Writes the needed file to `directory`."""
    (directory / "sitecustomize.py").write_text(_BLOCKER)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(directory), str(ROOT)])}
    return run_to_its_end([sys.executable, *arguments], cwd=directory, env=environment)
