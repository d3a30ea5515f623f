"""Runs a program of several steps plain and in a session of every mode, and compares the two bit for bit.

A factory makes the program, from the same random numbers each time: it builds the model, inputs and optimizers, and
returns a function that runs step `i` and returns the tensors to compare (losses, gradients, parameters). Plans are
followed on a virtual machine with real tensors, under shares of the peak of keeping everything, and under the least
budget.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

import vdnn
from tests.runtime.rigs.limits import grouped
from tests.runtime.rigs.side_by_side import assert_nothing_alive, same_bits
from vdnn import _C
from vdnn.planning.least_memory import least_bytes
from vdnn.runtime.machine.virtual_machine import VirtualMachine
from vdnn.runtime.session.session import Session
from vdnn.step.recording import Recording

Step = Callable[[int], Iterable[torch.Tensor | None]]
Factory = Callable[[], Step]

_SHARES = {"plan at 90 %": 0.9, "plan at 60 %": 0.6, "plan at the least": 0.0}
PLAN_MODES = tuple(_SHARES)
MODES = ("vdnn-all", "recompute-all", *PLAN_MODES)

_SEED = 20
_RECORDED_STEPS = 6  # one to warm up, one to find the end of a step, and more that may differ in kind


@dataclass(frozen=True, slots=True)
class Outcome:
    """The results of the steps, and the exception that ended them, if one did."""

    steps: list[list[torch.Tensor | None]]
    error: Exception | None


def assert_same_in(
    mode: str, factory: Factory, steps: int = 8, *, marks_steps: bool = False, **options: Any
) -> Session:
    """Asserts that every step returns the same bits as without a session. With `marks_steps` each step ends with
    session.step(). `options` are passed to vdnn.offload. Returns the session, closed and empty."""
    plain = run_plain(factory, steps, mode)
    if plain.error is not None:
        raise plain.error
    session, ours = run_in(mode, factory, steps, marks_steps=marks_steps, **options)
    if ours.error is not None:
        raise ours.error
    _assert_same_steps(plain, ours)
    return session


def assert_same_error_in(
    mode: str, factory: Factory, kind: type[Exception], phrase: str, steps: int = 8, **options: Any
) -> Session:
    """Asserts that the same step raises `kind` with `phrase` in its text, without a session and in it, and that all
    earlier steps return the same bits."""
    plain = run_plain(factory, steps, mode)
    _assert_raised("plain torch", plain, kind, phrase)
    session, ours = run_in(mode, factory, steps, **options)
    _assert_raised(mode, ours, kind, phrase)
    _assert_same_steps(plain, ours)
    return session


def run_plain(factory: Factory, steps: int, mode: str = "") -> Outcome:
    """Runs without a session. The modes with a plan run on a machine here too: under a Python dispatch mode torch
    computes forward-mode derivatives in another way, which changes the last bits."""
    with VirtualMachine("titan-x", fake=False) if mode in _SHARES else contextlib.nullcontext():
        return _run(factory, steps, contextlib.nullcontext())


def run_in(
    mode: str, factory: Factory, steps: int, *, marks_steps: bool = False, **options: Any
) -> tuple[Session, Outcome]:
    """Runs in a session. Returns the closed session and the outcome."""
    with contextlib.ExitStack() as stack:
        if mode in _SHARES:
            budget = _budget(factory, _SHARES[mode], marks_steps=marks_steps)
            machine = stack.enter_context(VirtualMachine("titan-x", fake=False))
            session = vdnn.offload(budget=budget, device=machine, min_bytes=0, **options)
        else:
            device: Any = stack.enter_context(_checked_device())
            windows = {"offload_window": "4KiB", "reload_window": "8KiB"}
            session = vdnn.offload(mode, device=device, **grouped({"min_bytes": 0, **windows, **options}))
        outcome = _run(factory, steps, session, on_step=session.step if marks_steps else lambda: None)
        if outcome.error is None:  # after an error the traceback holds tensors of the step
            assert_nothing_alive(session)
        session.close()
    return session, outcome


def _run(
    factory: Factory,
    steps: int,
    session: contextlib.AbstractContextManager[object],
    on_step: Callable[[], object] = lambda: None,
) -> Outcome:
    torch.manual_seed(_SEED)
    step = factory()
    done: list[list[torch.Tensor | None]] = []
    error: Exception | None = None
    with session:
        for index in range(steps):
            try:
                found = step(index)
                with _disable_current_modes():  # a machine would count the clones
                    done.append([None if one is None else one.detach().clone() for one in found])
            except Exception as raised:
                error = raised
                break
            del found
            on_step()
    return Outcome(done, error)


def _budget(factory: Factory, share: float, *, marks_steps: bool) -> int | str:
    """The given share of the peak of keeping everything, but at least the least bytes of moving everything: for the
    kind of step that needs most."""
    recordings = [] if not share else _recordings(factory, marks_steps=marks_steps)
    return max((max(round(share * one.peak_bytes), least_bytes(one)) for one in recordings), default="min")


def _recordings(factory: Factory, *, marks_steps: bool) -> list[Recording]:
    """One recording of each kind of step among the first steps."""
    found: list[Recording] = []
    with VirtualMachine("titan-x", fake=False) as machine:
        session = vdnn.offload(budget="100%", device=machine, min_bytes=0)

        def collect() -> None:
            if marks_steps:
                session.step()
            recording = session.recording
            if recording is not None and recording not in found:
                found.append(recording)

        _run(factory, _RECORDED_STEPS, session, on_step=collect)
        session.close()
    gc.collect()
    return found


@contextlib.contextmanager
def _checked_device() -> Iterator[_C.Device]:
    """A device with copies at random times, under the ordering checker."""
    device = _C.OrderingChecker(_C.SimDevice(schedule=_C.Schedule.RANDOM, seed=7))
    yield device
    device.close()
    assert device.take_violations() == []


def _assert_same_steps(plain: Outcome, ours: Outcome) -> None:
    assert len(plain.steps) == len(ours.steps), f"{len(plain.steps)} steps plain, {len(ours.steps)} in the session"
    for index, (left, right) in enumerate(zip(plain.steps, ours.steps, strict=True)):
        assert len(left) == len(right), f"step {index} returns {len(left)} tensors plain, {len(right)} in the session"
        differing = [place for place, pair in enumerate(zip(left, right, strict=True)) if not same_bits(*pair)]
        assert not differing, f"step {index} differs in {[_difference(left[one], right[one]) for one in differing]}"


def _difference(plain: torch.Tensor | None, ours: torch.Tensor | None) -> str:
    if plain is None or ours is None or plain.dtype != ours.dtype or plain.shape != ours.shape:
        return f"{_kind(plain)} plain, {_kind(ours)} in the session"
    return f"{_kind(plain)} by up to {(plain.double() - ours.double()).abs().max().item() if plain.numel() else 0:.3g}"


def _kind(tensor: torch.Tensor | None) -> str:
    return "None" if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')}{[*tensor.shape]}"


def _assert_raised(where: str, outcome: Outcome, kind: type[Exception], phrase: str) -> None:
    if outcome.error is None:
        raise AssertionError(f"{where}: all {len(outcome.steps)} steps ran, expected {kind.__name__}: {phrase}")
    if not isinstance(outcome.error, kind) or phrase not in str(outcome.error):
        raise AssertionError(f"{where}: expected {kind.__name__}: {phrase}") from outcome.error
