"""Properties that must hold besides equal numbers: no container grows over the steps, no setting stays changed, and
forks live.

Each function looks at one program and says what is wrong with it, or returns None.
"""

from __future__ import annotations

import gc
import itertools
import os
import sys
import threading
from collections.abc import Callable, Sized
from random import Random
from types import FrameType
from typing import Any

import torch

import vdnn
from tests.fuzz.outcomes import outcome_of
from tests.fuzz.plot import program_of
from tests.fuzz.program import STEPS, Program
from tests.fuzz.sessions import open_session, session_for
from tests.fuzz.world import World, switches

_ROUNDS = 5  # each round runs all steps of a program
_STATUS = 0x7F


def growing_book(program: Program) -> str | None:
    """Finds a container of the session that is longer after each round of the program's steps."""
    sizes: list[dict[str, int]] = []
    with session_for(program.mode) as enter:
        world = World(program)
        for _ in range(_ROUNDS):
            for step in range(STEPS):
                # The schedule continues, so the same step has another number in the next round.
                world.schedule = len(sizes) * STEPS
                outcome_of(world, step, enter)
            with enter() as session:
                sizes.append(containers(session))
    for name, last in sizes[-1].items():
        lengths = [one.get(name, 0) for one in sizes]
        if all(later > earlier for earlier, later in itertools.pairwise(lengths)):
            return f"{name} grows: {lengths}, {last} at the end"
    return None


def containers(root: Any) -> dict[str, int]:
    """The lengths of all containers that can be reached from a vdnn object through attributes of vdnn objects."""
    found: dict[str, int] = {}
    waiting, seen = [("session", root)], {id(root)}
    while waiting:
        path, one = waiting.pop()
        for name, value in _attributes(one):
            if id(value) in seen:
                continue
            if name in ("lookahead", "_by_source"):  # these forget released entries now and then, not at once
                continue
            is_weak = type(value).__name__.startswith("Weak") and isinstance(value, Sized)
            if isinstance(value, dict | list | set) or is_weak:
                found[f"{path}.{name}"] = len(value)
            elif type(value).__module__.startswith("vdnn."):
                seen.add(id(value))
                waiting.append((f"{path}.{name}", value))
    return found


def _attributes(one: Any) -> list[tuple[str, Any]]:
    named = list(getattr(one, "__dict__", {}).items())
    for kind in type(one).__mro__:
        slots = getattr(kind, "__slots__", ())
        named += [(name, getattr(one, name, None)) for name in ([slots] if isinstance(slots, str) else slots)]
    return named


class _Interrupter:
    """Raises KeyboardInterrupt at the n-th line or return in vdnn's Python code or its callees, as a signal may."""

    def __init__(self, at: int, *, at_entries: bool) -> None:
        self._left = at
        self._at_entries = at_entries  # here a context manager has changed a setting, and its __exit__ will not run
        self.raised_at = ""

    def __call__(self, frame: FrameType, event: str, argument: object) -> Any:
        if self.raised_at or not _is_within_vdnn(frame):
            return None
        name = frame.f_code.co_name
        if (event == "return" and name == "__enter__") if self._at_entries else event in ("line", "return"):
            self._left -= 1
            if self._left < 0:
                self.raised_at = f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self


def _is_within_vdnn(frame: FrameType) -> bool:
    """Is the frame in vdnn, or called by it? Finalizers and what they call are excluded, because Python only prints
    their exceptions."""
    near: list[FrameType] = []
    one: FrameType | None = frame
    while one is not None and len(near) < 4:
        near.append(one)
        one = one.f_back
    if any(each.f_code.co_name == "__del__" for each in near):
        return False
    for each in near:
        if each.f_code.co_name == "<lambda>":
            return False
        if each.f_code.co_filename.startswith(vdnn.__path__[0]):
            return True
    return False


def interrupted_badly(program: Program, trials: int = 20) -> str | None:
    """Interrupts a step at random lines within vdnn's code. Reports settings that differ afterwards."""
    random = Random(program.seed)
    before = switches()
    for trial in range(trials):
        at_entries = trial % 2 == 1
        interrupter = _Interrupter(random.randrange(40 if at_entries else 4_000), at_entries=at_entries)
        try:
            with session_for(program.mode) as enter:
                world = World(program)
                # an interrupt within __enter__ means that the session was not entered, as far as anybody can tell
                with enter():
                    sys.settrace(interrupter)
                    try:
                        outcome_of(world, 0)
                    finally:
                        sys.settrace(None)
        except KeyboardInterrupt:
            pass
        found = switches()
        if found != before:
            _switch_back()
            return f"interrupted at {interrupter.raised_at}: {found}, before {before}"
    return None


def _switch_back() -> None:
    torch.set_grad_enabled(True)
    torch.set_autocast_enabled("cpu", False)


def child_dies(program: Program) -> str | None:
    """Forks a child that starts threads and collects a session that its parent dropped, as the worker of a data loader
    does."""
    gc.collect()
    gc.disable()
    try:
        _drop_a_session(program)
        return _fork(_collected_beside_threads)
    finally:
        gc.enable()
        gc.collect()


def _drop_a_session(program: Program) -> None:
    """Drops the session within a cycle, so that it lives until the collector runs."""
    session = open_session(program.mode, "sim")
    cycle: list[object] = [session]
    cycle.append(cycle)
    world = World(program)
    outcome_of(world, 0, lambda: session)


def _collected_beside_threads() -> None:
    threads = [threading.Thread(target=threading.Event().wait, args=(30,), daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    gc.collect()


def _fork(in_child: Callable[[], None]) -> str | None:
    child = os.fork()
    if not child:
        try:
            os.close(2)
            in_child()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return None if not status else f"the child ended with status {status & _STATUS} (a signal) or {status >> 8}"


def first_seed(finds: Callable[[Program], str | None], seeds: range, mode: str) -> tuple[int, str] | None:
    """The seed of the first program for which `finds` reports something, and the report."""
    for seed in seeds:
        said = finds(program_of(seed, mode))
        if said is not None:
            return seed, said
    return None
