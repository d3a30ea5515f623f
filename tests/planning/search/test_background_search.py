"""A search in the background finds what an awaited one finds, never holds Python's lock, and ends when told to."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.planning.search.test_native_search import long_step
from vdnn import _C
from vdnn.errors import ClosedError, InvalidArgumentError
from vdnn.planning.costs import LinkCosts
from vdnn.planning.least_memory import least_bytes
from vdnn.planning.planned_step import plan_step
from vdnn.planning.policies import PlanRequest
from vdnn.planning.search.auto import Auto, FoundPlans
from vdnn.planning.search.effort import QUICK, Effort
from vdnn.planning.search.plan_search import make_plan_search

_LINK = LinkCosts(1e9, 2e9, 2.5e9, 3)
_ENDLESS = Effort(moves=1e9, trials=1e9, most_trials=10**9, moves_a_trial=10**9)
_ROOT = Path(__file__).parents[3]


def request(seed: int = 0, count: int = 40) -> PlanRequest:
    """A step that any plan makes longer: a search for it does not end early."""
    recording = long_step(seed, count, has_host=False)
    return PlanRequest(recording, _LINK, (9 * least_bytes(recording) + recording.peak_bytes) // 10)


def endless() -> _C.PlanSearch:
    return make_plan_search(request(), _ENDLESS)


def threads() -> set[Path]:
    """All of this process, native ones included."""
    return set(Path("/proc/self/task").iterdir())


@pytest.mark.parametrize("seed", range(3))
def test_it_finds_the_plan_of_an_awaited_search(seed: int) -> None:
    asked = request(seed)
    background = _C.BackgroundSearch(make_plan_search(asked, QUICK))
    assert background.wait_for(600)
    found = background.found
    assert [step_ns for step_ns, _, _ in found] == sorted(step_ns for step_ns, _, _ in found)
    awaited = plan_step(*asked, Auto(QUICK))
    taken_over = plan_step(*asked, FoundPlans([(chosen, absences) for _, chosen, absences in found]))
    assert taken_over.plan == awaited.plan
    assert taken_over.timeline == awaited.timeline


def test_two_searches_share_what_they_search() -> None:
    search = make_plan_search(request(), QUICK)
    both = [_C.BackgroundSearch(search) for _ in range(2)]
    assert all(one.wait_for(600) for one in both)
    assert both[0].found == both[1].found != []


def test_it_goes_on_while_python_keeps_its_lock() -> None:
    search = endless()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(10_000)  # seconds: this thread keeps the lock
    try:
        background = _C.BackgroundSearch(search)
        before = search.evaluations
        ended = time.monotonic() + 60
        while search.evaluations < before + 50 and time.monotonic() < ended:
            pass
        assert search.evaluations >= before + 50
        background.cancel()
    finally:
        sys.setswitchinterval(interval)


def test_a_cancelled_search_ends_and_has_found_nothing() -> None:
    background = _C.BackgroundSearch(endless())
    assert not background.is_done
    with pytest.raises(InvalidArgumentError, match="goes on"):
        _ = background.found
    background.cancel()
    assert background.wait_for(600)
    assert background.is_done
    assert background.found == []


def test_a_search_that_is_dropped_leaves_no_thread() -> None:
    before = threads()
    background = _C.BackgroundSearch(endless())
    assert len(threads() - before) == 1
    del background
    gc.collect()
    assert threads() <= before


def test_a_forked_child_neither_waits_for_it_nor_ends_it() -> None:
    background = _C.BackgroundSearch(endless())
    child = os.fork()
    if not child:
        code = 1
        try:
            assert not background.is_done
            background.cancel()
            with pytest.raises(ClosedError):
                background.wait_for(600)
            del background
            gc.collect()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert not background.is_done, "the child has cancelled its own copy"


@pytest.mark.parametrize("end", ["", "sys.exit(3)", "raise KeyboardInterrupt"])
def test_the_end_of_the_interpreter_does_not_wait_for_it(end: str) -> None:
    """The object is alive in a module when the interpreter ends."""
    program = f"""
        import sys
        from tests.planning.search.test_background_search import _C, endless
        sys.kept = _C.BackgroundSearch(endless())
        {end}
    """
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], cwd=_ROOT, timeout=600, capture_output=True, check=False
    )
    expected = {"": 0, "sys.exit(3)": 3}.get(end, -signal.SIGINT)
    assert ran.returncode == expected, ran.stderr.decode()


@pytest.fixture
def ctrl_c_interrupts() -> Iterator[None]:
    """Python leaves SIGINT ignored if it was as it began: in the background of a script."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c_interrupts")
def test_ctrl_c_ends_a_search_that_python_waits_for() -> None:
    search = endless()
    timer = threading.Timer(0.1, signal.raise_signal, [signal.SIGINT])
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        search.recomputes()
    timer.join()
    assert search.evaluations > 0


def test_signals_go_to_the_threads_of_the_program() -> None:
    before = threads()
    background = _C.BackgroundSearch(endless())
    (thread,) = threads() - before
    status = (thread / "status").read_text()
    blocked = int(next(line.split()[1] for line in status.splitlines() if line.startswith("SigBlk")), 16)
    assert blocked >> (signal.SIGINT - 1) & 1
    assert blocked >> (signal.SIGTERM - 1) & 1
    background.cancel()
