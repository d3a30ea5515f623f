"""Runs a python in which `import torch` fails as if it were not installed, though these tests' environment
has it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# Found by every python that has its directory on PYTHONPATH, before any program runs. A sitecustomize of the
# environment itself, if there is one, stays unread in these processes.
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
    """`python <arguments>` with the checkout importable and torch not; `directory` holds what makes it so."""
    (directory / "sitecustomize.py").write_text(_BLOCKER)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(directory), str(ROOT)])}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
