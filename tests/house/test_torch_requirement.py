"""Importing vdnn needs no torch, and touching the runtime without one is a single clear sentence."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import vdnn
from tests.house.without_torch import python_without_torch
from vdnn.errors import TorchMissingError
from vdnn.requirements import in_range, require_torch, torch_version

ROOT = Path(__file__).resolve().parents[2]


def test_importing_vdnn_imports_no_torch() -> None:
    program = "import sys, vdnn, vdnn.doctor, vdnn.cli.main; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_touching_the_runtime_without_torch_is_one_sentence(tmp_path: Path) -> None:
    program = "import vdnn\ntry:\n    vdnn.offload\nexcept ImportError as error:\n    print(error)"
    done = python_without_torch(tmp_path, "-c", program)
    assert done.stdout == (
        "this part of vdnn needs torch>=2.10, but no torch is installed: run pip install 'torch>=2.10'.\n"
    )


def test_importing_a_runtime_name_without_torch_is_an_import_error(tmp_path: Path) -> None:
    done = python_without_torch(tmp_path, "-c", "from vdnn import offload")
    assert done.returncode == 1
    assert "TorchMissingError: this part of vdnn needs torch>=2.10" in done.stderr


@pytest.mark.parametrize(
    ("version", "accepted"),
    [
        ("2.10.0", True),
        ("2.13.0+cpu", True),
        ("3.0.0", True),
        ("2.9.1", False),
        ("1.13.1", False),
        ("2.10.0a0+git123", True),
        ("unreadable", True),
    ],
)
def test_torch_is_accepted_from_2_10_on(version: str, accepted: bool) -> None:
    assert in_range(version) is accepted


def test_an_old_torch_is_named_with_what_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    old = ModuleType("torch")
    old.__version__ = "2.4.1"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", old)
    with pytest.raises(TorchMissingError, match=r"needs torch>=2\.10, but torch 2\.4\.1 is installed"):
        require_torch()


def test_a_torch_that_does_not_load_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise OSError('libtorch.so: cannot open')\n")
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(TorchMissingError, match=r"importing torch failed \(OSError: libtorch\.so: cannot open\)"):
        torch_version()


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'offlode'"):
        _ = vdnn.offlode


def test_every_public_name_exists() -> None:
    assert all(hasattr(vdnn, name) for name in vdnn.__all__)
