"""If the accelerator cannot be loaded, the error says why and what to do."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest

from deferred.extension import key_of_build, one_build_at_a_time
from tests import forked

ROOT = Path(__file__).parents[2]


def run(program: str, **environment: str) -> str:
    """Runs the program in a process of its own. Returns the last line of its error, or else its output."""
    done = forked.run(forked.run_code, program, folder=ROOT, environment=environment)
    return done.stderr.strip().splitlines()[-1] if done.returncode else done.stdout.strip()


LOAD = "from deferred import DeferredAccelerator, load_extension\nload_extension()\n"
BACKWARD = "import torch\ntorch.ones(1, requires_grad=True).sum().backward()\n"


@pytest.mark.slow
def test_loaded_after_a_backward_it_says_that_it_is_too_late() -> None:
    said = run(BACKWARD + LOAD)
    assert said.startswith("vdnn.errors.VdnnError: the deferred accelerator was loaded too late: this process has run")
    assert "Call deferred.load_extension() before the first backward" in said
    again = "try:\n  load_extension()\nexcept Exception as error:\n  print(str(error)[:42])\n"
    imports, _ = LOAD.split("\n", 1)
    repeated = run(f"{BACKWARD}{imports}\n{again * 2}{BACKWARD}")  # the CPU's backward still works
    assert repeated.splitlines() == [said.partition(": ")[2][:42]] * 2


def test_an_accelerator_that_is_made_too_late_says_so() -> None:
    made = LOAD.replace("load_extension()\n", "DeferredAccelerator()\n")
    assert "was loaded too late" in run(BACKWARD + made)


def test_loaded_before_it_works() -> None:
    step = "with DeferredAccelerator():\n  x = torch.ones(2, device='deferred', requires_grad=True)\n"
    assert run(f"{LOAD}{BACKWARD}{step}  x.sum().backward()\n  print(x.grad.tolist())") == "[1.0, 1.0]"


@pytest.mark.parametrize(
    ("hidden", "said"),
    [
        ("ninja", "ninja is not installed. Run pip install ninja"),
        ("no-such-compiler", "there is no C++ compiler: 'no-such-compiler' is not on PATH"),
    ],
)
def test_what_it_is_built_with_is_asked_for_by_name(hidden: str, said: str, tmp_path: Path) -> None:
    hide = "import shutil\nwhich = shutil.which\n"
    hide += f"shutil.which = lambda name: None if name == {hidden!r} else which(name)\n"
    environment = {"VDNN_DEFERRED_BUILD": str(tmp_path), **({} if hidden == "ninja" else {"CXX": hidden})}
    assert said in run(hide + LOAD, **environment)


def test_a_library_that_is_built_needs_no_tools_and_no_ninja_run() -> None:
    hide = "import shutil\nshutil.which = lambda name: None\n"
    assert run(f"{hide}{LOAD}print('loaded')") == "loaded"


def test_a_library_of_other_sources_has_another_key(tmp_path: Path) -> None:
    (tmp_path / "extension.cpp").write_text("int a;")
    first = key_of_build(tmp_path)
    assert key_of_build(tmp_path) == first
    (tmp_path / "header.h").write_text("int b;")
    second = key_of_build(tmp_path)
    (tmp_path / "header.h").write_text("int c;")
    assert len({first, second, key_of_build(tmp_path)}) == 3


def test_a_lock_that_a_killed_build_left_stops_nobody(tmp_path: Path) -> None:
    (tmp_path / "lock").touch()
    with one_build_at_a_time(tmp_path):
        assert not (tmp_path / "lock").exists()
        with (tmp_path / "vdnn.lock").open("w") as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with (tmp_path / "vdnn.lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
