"""Runs a training plain and in sessions, from the same state, and reports where the two differ."""

from __future__ import annotations

import contextlib
import functools
import gc
import re
import sys

from tests.fuzz.outcomes import Kind, Verdict, apart, finalizers_watched, message_of, says_modified
from tests.fuzz.program import Program
from tests.fuzz.sessions import RECHECK, PlainDispatch
from tests.fuzz.trainings.ways import Way, may_refuse, sessions_of, way_of
from tests.fuzz.trainings.world import PlannedError, StepOutcome, Trace, Training
from vdnn.errors import OperandModifiedError, RecomputeError, VdnnError
from vdnn.runtime.recompute.proofs import disabled_recipes


def plain_outcomes(program: Program) -> list[StepOutcome]:
    way = way_of(program.mode)
    with PlainDispatch() if way.is_planned else contextlib.nullcontext():
        return _plain_outcomes(program, way)


def _plain_outcomes(program: Program, way: Way) -> list[StepOutcome]:
    training = Training(program, steps=way.steps, steps_on_cpu=way.steps_on_cpu)
    return list(training.outcomes(lambda _: contextlib.nullcontext()))


def verdict_of(program: Program, recheck: int = RECHECK) -> Verdict:
    """Judges a program. Clears the state that earlier programs left in the process."""
    disabled_recipes.clear()
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is not None:  # steps are not deferred in a process that has compiled code
        dynamo.counters["frames"]["total"] = 0
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
    """The first differing step decides. A program whose plain run does not repeat its own bits is not judged."""
    plain = plain_outcomes(program)
    verdict = _against_plain(program, way_of(program.mode), plain, recheck)
    if verdict.kind is Kind.DIFFERENT and _first_difference(plain, plain_outcomes(program)) is not None:
        return Verdict(Kind.SAME, what="plain does not repeat its own bits")
    return verdict


def _against_plain(program: Program, way: Way, plain: list[StepOutcome], recheck: int) -> Verdict:
    step = -1
    try:
        plain_again = functools.partial(_plain_outcomes, program, way)
        with sessions_of(way, program.seed, recheck, plain_again) as open_session, contextlib.ExitStack() as stack:
            training = Training(program, steps=way.steps, steps_on_cpu=way.steps_on_cpu)
            outcomes = stack.enter_context(contextlib.closing(training.outcomes(open_session)))
            for step, (wanted, found) in enumerate(zip(plain, outcomes, strict=True)):
                verdict = compared(step, wanted, found, program, training)
                if verdict.kind is not Kind.SAME:
                    return verdict
                if wanted.error is not None and not isinstance(wanted.error, PlannedError):
                    # Both failed within a step. What each had done by then may differ.
                    return Verdict(Kind.SAME)
    except Exception as error:
        if _is_torchs_own(error):  # of a step that waited until the session was left
            return Verdict(Kind.SAME)
        kind = Kind.REFUSED if may_refuse(error, program.listing()) else Kind.DIFFERENT
        return Verdict(kind, step, f"outside of a step: {message_of(error)}")
    return Verdict(Kind.SAME)


def _first_difference(plain: list[StepOutcome], again: list[StepOutcome]) -> int | None:
    for step, (one, other) in enumerate(zip(plain, again, strict=True)):
        if one.trace != other.trace or type(one.error) is not type(other.error):
            return step
    return None


def compared(step: int, plain: StepOutcome, ours: StepOutcome, program: Program, training: Training) -> Verdict:
    if ours.error is not None and not _is_same(plain.error, ours.error):
        refuses = _may_refuse(ours.error, program, training)
        kind = Kind.REFUSED if refuses else Kind.DIFFERENT
        return Verdict(kind, step, f"plain {message_of(plain.error)}, ours {message_of(ours.error)}")
    if plain.error is not None and ours.error is None and not _is_torchs_own(plain.error):
        return Verdict(Kind.DIFFERENT, step, f"ours has no error, plain {message_of(plain.error)}")
    found = _difference(*_ordered(program, plain.trace, ours.trace), is_cut=plain.error is not None)
    if found is None:
        return Verdict(Kind.SAME)
    return Verdict(Kind.DIFFERENT, step, found)


def _is_same(plain: BaseException | None, ours: BaseException) -> bool:
    if plain is None:
        return False
    if says_modified(plain) and (says_modified(ours) or isinstance(ours, OperandModifiedError)):
        return True
    if _is_torchs_own(plain) and _is_torchs_own(ours):
        return True  # it names a place in the list of a slice
    # An error of a step names how far the step came, and gives the reason.
    return type(plain) is type(ours) or (isinstance(ours, VdnnError) and str(plain) in str(ours))


# Fused SGD fails if only some of the parameters of a call have a momentum buffer. A slice may have fewer of them.
# swap_tensors refuses a parameter whose gradient is part of a graph; a gradient that is away is in none.
_TORCHS_OWN = (
    r"expected Tensor as element \d+ in argument \d+, but got NoneType",
    r"Expected use_count of t1 to be 1 or 2 with an AccumulateGrad node",
)


def _is_torchs_own(error: BaseException) -> bool:
    """Is this an error of plain PyTorch that a session may avoid?"""
    return any(re.search(one, str(error)) for one in _TORCHS_OWN)


def _may_refuse(error: BaseException, program: Program, training: Training) -> bool:
    if isinstance(error, RecomputeError | OperandModifiedError) and training.unseen_writes:
        return True
    return may_refuse(error, program.listing())


def _ordered(program: Program, *traces: Trace) -> tuple[Trace, ...]:
    """The traces, with the results of neighboring hooks in one order if forwards ran on other threads. Autograd orders
    the nodes of a backward by numbers that each thread counts for itself, and a session makes nodes as well."""
    if "'thread')" not in program.listing():
        return traces
    return tuple(_with_sorted_hooks(trace) for trace in traces)


def _with_sorted_hooks(trace: Trace) -> Trace:
    found: Trace = []
    hooks: Trace = []
    for one in trace:
        if "hook" in one[0]:
            hooks.append(one)
        else:
            found += [*sorted(hooks, key=repr), one]
            hooks = []
    return found + sorted(hooks, key=repr)


def _difference(plain: Trace, ours: Trace, *, is_cut: bool) -> str | None:
    for (label, wanted), (found_label, found) in zip(plain, ours, strict=False):
        if label != found_label:
            return f"{label}, ours {found_label}"
        if wanted != found:
            return f"{label}: {apart(wanted, found)}"
    if len(plain) != len(ours) and not is_cut:
        return f"{len(plain)} results, ours {len(ours)}"
    return None
