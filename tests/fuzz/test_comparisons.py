"""Differences between two runs of a program that a comparison allows, and those that it does not."""

from __future__ import annotations

import pytest

import tests.fuzz.plot
import tests.fuzz.trainings.plot  # noqa: F401 both register their productions
from tests.fuzz.outcomes import Kind, warnings_of_vdnn
from tests.fuzz.program import ALWAYS, Program, Statement
from tests.fuzz.run import Drawn
from tests.fuzz.trainings import verdicts
from tests.fuzz.trainings.world import StepOutcome, Trace, Training
from vdnn.errors import RecomputeError

_VALUE, _GRADIENT = ("hook value 0", b"1234"), ("tensor hook 0", b"5678")
_LOSS = ("loss", b"0000")


def _compared(how: str, plain: Trace, ours: Trace) -> Kind:
    """The verdict on a training whose forward runs in this way."""
    body = (Statement("forward", 1, (0,), (0, how), ALWAYS),)
    program = Program(0, "state, none", (Statement("loop", -1, (), ("one",), ALWAYS, body),))
    return verdicts.compared(0, StepOutcome(None, plain), StepOutcome(None, ours), program, Training(program)).kind


def test_hooks_may_run_in_another_order_only_if_a_forward_ran_on_a_thread() -> None:
    plain, ours = [_VALUE, _GRADIENT, _LOSS], [_GRADIENT, _VALUE, _LOSS]
    assert _compared("thread", plain, ours) is Kind.SAME
    assert _compared("plain", plain, ours) is Kind.DIFFERENT
    assert _compared("plain", plain, plain) is Kind.SAME


def test_on_threads_too_hooks_have_equal_values_and_stay_between_other_results() -> None:
    other = ("tensor hook 0", b"5679")
    assert _compared("thread", [_VALUE, _GRADIENT], [other, _VALUE]) is Kind.DIFFERENT
    assert _compared("thread", [_VALUE, _LOSS, _GRADIENT], [_GRADIENT, _LOSS, _VALUE]) is Kind.DIFFERENT
    assert _compared("thread", [_VALUE, _GRADIENT], [_VALUE]) is Kind.DIFFERENT


def _shifted_softmax(mode: str, *, in_no_grad: bool) -> Program:
    shift = Statement("in_place", 2, (1,), ("add_",), ALWAYS)
    body = (
        Statement("linear", 1, (0,), ("module",), ALWAYS),
        Statement("no_grad", -1, (), (), ALWAYS, (shift,)) if in_no_grad else shift,
        Statement("softmax", 3, (2,), ("log_softmax", 1), ALWAYS),
        Statement("loss", 4, (3, 2), ("huber",), ALWAYS),
        Statement("backward", -1, (4,), ("plain",), ALWAYS),
    )
    return Program(202127, mode, body)


@pytest.mark.filterwarnings("ignore")
def test_a_write_that_no_graph_shows_may_be_found_by_a_recheck_and_a_recorded_one_gives_the_bits_of_plain() -> None:
    drawn = Drawn("steps")
    with warnings_of_vdnn():
        hidden = drawn.verdict_of(_shifted_softmax("drawn", in_no_grad=True))
        shown = drawn.verdict_of(_shifted_softmax("drawn", in_no_grad=False))
    assert hidden.kind is Kind.REFUSED, hidden
    assert RecomputeError.__name__ in hidden.what
    assert shown.kind is Kind.SAME, shown
