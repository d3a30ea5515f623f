"""Runs a program plain and in a session, from the same state, and reports where the two differ."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import re
import sys
from collections.abc import Callable, Iterator
from enum import Enum
from typing import NamedTuple

import torch

from tests.fuzz.program import Program
from tests.fuzz.sessions import RECHECK, Enter, is_planned, plain_for, session_for, steps_of
from tests.fuzz.world import PlannedError, World
from vdnn.errors import OperandModifiedError, RecomputeError
from vdnn.runtime.recompute.proofs import disabled_recipes

MODIFIED = "modified by an inplace operation"
# Autograd's message about a view for the same fact. With hooks on saved tensors, of any kind, it gives the other
# message.
_MODIFIED_VIEW = "a view and its base or another view of its base has been modified inplace"
_OTHER_MEMORY = "has other memory than in the forward pass"  # caused by `parameter.data = ...`
Trace = list[tuple[str, "bytes | None"]]


class Kind(Enum):
    SAME = "same"
    REFUSED = "refused"  # vdnn raises for a write that it may refuse
    LOST = "lost"  # an unseen write is lost, as with any hooks that copy
    DIFFERENT = "different"


class Outcome(NamedTuple):
    """Results of one step."""

    error: BaseException | None
    trace: Trace
    state: Trace  # the state after the step
    unseen_writes: int  # counted up to the end of the step
    late_writes: int
    writes_without_graph: int
    is_planned: bool


class Verdict(NamedTuple):
    kind: Kind
    step: int = -1
    what: str = ""

    @property
    def sort(self) -> str:
        """Groups verdicts: two differences of one sort may have one cause."""
        return re.sub(r"[^a-zA-Z ]+.*", "", self.what)[:40]

    def __str__(self) -> str:
        where = f" in step {self.step}" if self.step >= 0 else ""
        return f"{self.kind.value}{where}: {self.what}" if self.what else f"{self.kind.value}{where}"


def outcome_of(world: World, step: int, enter: Enter = contextlib.nullcontext) -> Outcome:
    error = None
    try:
        with enter():
            world.run_step(step)
    except Exception as raised:
        error = raised.with_traceback(None)
        error.__context__ = error.__cause__ = None
    results, world.trace = world.trace, []
    world.note_state()
    writes = world.unseen_writes, world.late_writes, world.writes_without_graph
    return Outcome(error, results, world.trace, *writes, is_planned(world.program.mode))


def plain_outcomes(program: Program) -> list[Outcome]:
    world, enter = World(program), functools.partial(plain_for, program.mode)
    return [outcome_of(world, step, enter) for step in range(steps_of(program.mode))]


def verdict_of(program: Program, recheck: int = RECHECK) -> Verdict:
    """Judges the numbers first, then everything else that must not happen. Clears the state that earlier programs left
    in the process."""
    disabled_recipes.clear()
    with finalizers_watched() as raised:
        gc.disable()
        try:
            verdict = _verdict_of_numbers(program, recheck)
            gc.collect(0)  # everything that the program made
        finally:
            gc.enable()
    if raised and verdict.kind is not Kind.DIFFERENT:
        return Verdict(Kind.DIFFERENT, verdict.step, f"in a finalizer: {raised[0]}")
    return verdict


def _verdict_of_numbers(program: Program, recheck: int) -> Verdict:
    """The first differing step decides. A refusal ends the comparison, because the states are not equal after it."""
    plain = plain_outcomes(program)

    def run(enter: Enter) -> None:
        world = World(program)
        for step in range(steps_of(program.mode)):
            outcome_of(world, step, enter)

    with session_for(program.mode, recheck, run) as enter:
        world = World(program)
        for step, wanted in enumerate(plain):
            found = outcome_of(world, step, enter)
            verdict = compared(step, wanted, found)
            if says_modified(found.error) and isinstance(wanted.error, PlannedError):
                # The hook of the program that raises runs after the recompute that finds the write.
                wanted = plain_past_its_hooks(program, step)
                verdict = compared(step, wanted, found)
            if verdict.kind is Kind.DIFFERENT and is_torchs_own(program, step, wanted, found):
                return Verdict(Kind.SAME)
            if verdict.kind is not Kind.SAME:
                later = _unless_said_later(verdict, wanted, found, enter)
                if later.kind is Kind.DIFFERENT and is_lost_by_any_copy(program, step, wanted):
                    return Verdict(Kind.LOST, step, verdict.what)
                return later
            if says_modified(found.error):
                break  # both failed within a backward, and may have made different gradients by then
    return Verdict(Kind.SAME)


def plain_past_its_hooks(program: Program, step: int) -> Outcome:
    """The plain outcome of this step if the program's own hooks do not raise in it."""
    world, enter = World(program), functools.partial(plain_for, program.mode)
    for before in range(step):
        outcome_of(world, before, enter)
    world.hooks_raise = False
    return outcome_of(world, step, enter)


def is_torchs_own(program: Program, step: int, plain: Outcome, ours: Outcome) -> bool:
    """Does torch itself raise the session's error under any hooks, although plain does not? Hooks that do nothing
    tell."""
    if ours.error is None or plain.error is not None:
        return False
    found = _under_hooks(program, step, lambda saved: saved)
    return found.error is not None and message_of(found.error) == message_of(ours.error)


def is_lost_by_any_copy(program: Program, step: int, plain: Outcome) -> bool:
    """Is the difference due to an unseen write to a saved tensor that the program releases before its use? Then hooks
    that only copy what is saved also differ from plain."""
    return plain.unseen_writes > 0 and compared(step, plain, _under_hooks(program, step, _copied)).kind is not Kind.SAME


def _copied(saved: torch.Tensor) -> torch.Tensor:
    return saved if saved.requires_grad and saved.is_leaf else saved.detach().clone()


def _under_hooks(program: Program, step: int, pack: Callable[[torch.Tensor], torch.Tensor]) -> Outcome:
    world = World(program)
    enter = functools.partial(torch.autograd.graph.saved_tensors_hooks, pack, lambda saved: saved)
    for before in range(step):
        outcome_of(world, before, enter)
    return outcome_of(world, step, enter)


def _unless_said_later(verdict: Verdict, plain: Outcome, ours: Outcome, enter: Enter) -> Verdict:
    """An exception that ends a step hides the result of its rechecks. The next end of a step or an optimizer reports
    it."""
    if verdict.kind is not Kind.DIFFERENT or plain.error is None or ours.error is None:
        return verdict
    try:
        with enter() as session:
            session.step()
    except RecomputeError as error:
        if may_refuse(error, plain):
            return Verdict(Kind.REFUSED, verdict.step, f"{verdict.what}; behind it {message_of(error)}")
    return verdict


@contextlib.contextmanager
def finalizers_watched() -> Iterator[list[str]]:
    """Collects the exceptions that are raised in finalizers, where nothing can catch them."""
    raised: list[str] = []
    before = sys.unraisablehook
    sys.unraisablehook = lambda one: raised.append(f"{one.object!r} raised {one.exc_value!r}"[:300])
    try:
        yield raised
    finally:
        sys.unraisablehook = before


def compared(step: int, plain: Outcome, ours: Outcome) -> Verdict:
    if ours.error is not None and plain.error is None:
        kind = Kind.REFUSED if may_refuse(ours.error, plain) else Kind.DIFFERENT
        return Verdict(kind, step, f"plain has no error, ours {message_of(ours.error)}")
    if plain.error is not None:
        if ours.error is None:
            return Verdict(Kind.DIFFERENT, step, f"ours has no error, plain {message_of(plain.error)}")
        # Which of two nodes of a backward fails first depends on where a write is found.
        is_other_node = says_modified(ours.error) and isinstance(plain.error, RuntimeError)
        if not is_other_node and _identity(plain.error) != _identity(ours.error):
            kind = Kind.REFUSED if may_refuse(ours.error, plain) else Kind.DIFFERENT
            return Verdict(kind, step, f"plain {message_of(plain.error)}, ours {message_of(ours.error)}")
    pairs = list(zip(plain.trace, ours.trace, strict=False))
    is_modified = says_modified(ours.error)
    if not is_modified:
        pairs += list(zip(plain.state, ours.state, strict=True))
    if is_modified:
        # Ours may find the write earlier in the same backward, when it recomputes from a tensor that was written to.
        if len(ours.trace) > len(plain.trace):
            return Verdict(Kind.DIFFERENT, step, f"ours went on behind the place where plain {message_of(plain.error)}")
    elif len(plain.trace) != len(ours.trace):
        return Verdict(Kind.DIFFERENT, step, f"{len(plain.trace)} results, ours {len(ours.trace)}")
    for (label, wanted), (found_label, found) in pairs:
        if label != found_label or wanted != found:
            also = "" if label == found_label else f", ours {found_label}"
            return Verdict(Kind.DIFFERENT, step, f"{label}{also}: {apart(wanted, found)}")
    return Verdict(Kind.SAME)


_PHRASES = ("backward through the graph a second time", "element 0 of tensors does not require grad")


def may_refuse(error: BaseException, plain: Outcome) -> bool:
    """Tells whether vdnn may raise an error that plain PyTorch does not raise. It may raise

    1. RecomputeError, OperandModifiedError, or the message that a parameter has other memory, if this or an earlier
       step wrote in a way that no version counter shows (writes.INVISIBLE);
    2. RecomputeError, if it wrote to a result in a way that the result's graph does not show. Such a write may leave
       the bits of what follows as they are for some steps, as log_softmax hardly changes with a shift;
    3. these, or autograd's error about a write, if there is a plan and a statement first wrote after the recorded step.
    """
    is_ours = isinstance(error, RecomputeError | OperandModifiedError) or _OTHER_MEMORY in str(error)
    if is_ours and plain.unseen_writes:
        return True
    if isinstance(error, RecomputeError) and plain.writes_without_graph:
        return True
    return plain.is_planned and plain.late_writes > 0 and (is_ours or says_modified(error))


def says_modified(error: BaseException | None) -> bool:
    """Is this autograd's error about a write, or OperandModifiedError, which uses the same words?"""
    return isinstance(error, RuntimeError) and any(one in str(error) for one in (MODIFIED, _MODIFIED_VIEW))


def _identity(error: BaseException) -> tuple[object, ...]:
    if says_modified(error):
        return (MODIFIED,)
    return type(error).__name__, *(phrase in str(error) for phrase in _PHRASES)


def message_of(error: BaseException | None) -> str:
    return f"{type(error).__name__}: {str(error)[:300]}"


def apart(wanted: bytes | None, found: bytes | None) -> str:
    """Describes the first number that differs."""
    if wanted is None or found is None or len(wanted) != len(found):
        sizes = ["none" if one is None else f"{len(one)} bytes" for one in (wanted, found)]
        return f"{sizes[0]}, ours {sizes[1]}"
    if len(wanted) % 4:
        return f"{wanted.hex()[:40]}, ours {found.hex()[:40]}"
    left, right = (torch.frombuffer(bytearray(one), dtype=torch.float32) for one in (wanted, found))
    differing = (left.view(torch.int32) != right.view(torch.int32)).nonzero().flatten()
    first = int(differing[0])
    return f"{left[first].item():.9g}, ours {right[first].item():.9g} ({len(differing)} of {len(left)})"


@contextlib.contextmanager
def warnings_of_vdnn() -> Iterator[list[str]]:
    """Collects vdnn's log messages at level warning."""
    said: list[str] = []

    class _Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    logger, handler = logging.getLogger("vdnn"), _Handler(logging.WARNING)
    before, logger.propagate = logger.propagate, False
    level = logger.level
    logger.setLevel(logging.WARNING)  # a program that another test ran may have raised it
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)
        logger.propagate = before
        logger.setLevel(level)
