"""vdnn.user_warnings: one category, shown at the line of the user's program."""

from __future__ import annotations

import functools
import sysconfig
import threading
import types
from collections.abc import Callable
from pathlib import Path

import pytest

import vdnn
from vdnn.user_warnings import warn


def function_in(path: Path, inner: Callable[[], object]) -> Callable[[], object]:
    """A function of the file `path` that calls `inner`."""
    module = types.ModuleType("elsewhere")
    module.__dict__["inner"] = inner
    exec(compile("def call():\n    inner()\n", str(path), "exec"), module.__dict__)
    call: Callable[[], object] = module.__dict__["call"]
    return call


def warns_below_a_trainer() -> Callable[[], object]:
    in_vdnn = function_in(Path(vdnn.__file__).parent / "runtime" / "somewhere.py", functools.partial(warn, "do that."))
    return function_in(Path(sysconfig.get_paths()["purelib"]) / "trainer.py", in_vdnn)


def test_a_warning_names_the_line_of_the_users_program() -> None:
    with pytest.warns(vdnn.VdnnWarning, match="^vdnn: do that.$") as warned:
        warns_below_a_trainer()()
    (one,) = warned
    assert one.filename == __file__


def test_on_a_thread_of_a_package_it_names_who_called_vdnn(recwarn: pytest.WarningsRecorder) -> None:
    thread = threading.Thread(target=warns_below_a_trainer())
    thread.start()
    thread.join()
    (one,) = recwarn
    assert Path(one.filename).name == "trainer.py"


def test_the_category_is_a_user_warning_that_a_filter_reaches() -> None:
    assert issubclass(vdnn.VdnnWarning, UserWarning)
