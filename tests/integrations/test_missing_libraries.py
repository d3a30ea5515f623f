"""If a library is missing, its integration names the extra that installs it. `import vdnn` imports none of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import forked

WITHOUT = """
import sys
sys.modules[{library!r}] = None
try:
    import vdnn.integrations.{module}
except ImportError as error:
    print(type(error).__name__, error)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "library", "extra"), [("huggingface", "transformers", "hf"), ("lightning", "lightning", "lightning")]
)
def test_a_missing_library_is_named_with_its_extra(module: str, library: str, extra: str, tmp_path: Path) -> None:
    said = forked.run(forked.run_code, WITHOUT.format(module=module, library=library), folder=tmp_path)
    assert said.stdout == (
        f"LibraryMissingError vdnn.integrations.{module} needs {library}, which is not installed: run pip install "
        f"'vdnn[{extra}]', or pip install {library}.\n"
    )


def test_importing_vdnn_imports_no_library_of_an_integration() -> None:
    libraries = ("torch", "transformers", "accelerate", "peft", "trl", "lightning", "pytorch_lightning")
    said = run(f"import sys, vdnn, vdnn.integrations; print([name for name in {libraries} if name in sys.modules])")
    assert said == "[]"


def run(program: str) -> str:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()
