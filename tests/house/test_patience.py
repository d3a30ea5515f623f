"""A process of a test that hangs ends at its limit, with its own stack and that of the test in the message."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest

from tests import forked
from tests.patience import Hung, run_to_its_end

HANGS = """
import threading
def waits_for_ever():
    threading.Event().wait()
print("begun", flush=True)
waits_for_ever()
"""


def waits_for_ever() -> None:
    print("begun", flush=True)
    threading.Event().wait()


def assert_both_stacks(hung: Hung) -> None:
    its, ours = str(hung).split("The stack of the test:")
    assert "did not end within 0.5 s" in its
    assert "begun" in its
    assert "in waits_for_ever" in its
    assert "in test_a_" in ours


def test_a_command_that_hangs_shows_both_stacks() -> None:
    with pytest.raises(Hung) as raised:
        run_to_its_end([sys.executable, "-S", "-c", HANGS], limit_s=0.5)
    assert_both_stacks(raised.value)


@pytest.mark.slow
def test_a_forked_program_that_hangs_shows_both_stacks(tmp_path: Path) -> None:
    with pytest.raises(Hung) as raised:
        forked.run(waits_for_ever, folder=tmp_path, limit_s=0.5)
    assert_both_stacks(raised.value)


def test_what_a_command_started_ends_with_it() -> None:
    """Else the child would keep the pipes open, and reading them would not end."""
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-S', '-c', {HANGS!r}])"
    with pytest.raises(Hung, match="begun"):
        run_to_its_end([sys.executable, "-S", "-c", code], limit_s=0.5)


def test_a_command_that_fails_shows_its_output() -> None:
    with pytest.raises(AssertionError, match="no such thing"):
        run_to_its_end([sys.executable, "-S", "-c", "import sys; sys.exit('no such thing')"], check=True)


def test_a_forked_program_has_a_folder_an_environment_and_an_exit_code_of_its_own(tmp_path: Path) -> None:
    code = "import os, sys; print(os.getcwd(), os.environ['SAID']); sys.exit(3)"
    ended = forked.run(forked.run_code, code, folder=tmp_path, environment={"SAID": "so"})
    assert (ended.returncode, ended.stdout) == (3, f"{tmp_path} so\n")
