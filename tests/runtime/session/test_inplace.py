"""In-place writes have the result of plain PyTorch: the same error, or bit for bit the same gradients.

With hooks active, autograd no longer checks versions, so the runtime does. Each case runs once plain and twice in a
session: with its saves still on the device when they are written to, and with the copies made and the sources released.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from tests.conftest import SCHEDULES
from tests.runtime.conftest import EITHER_WAY
from tests.runtime.identity.outcome import Snapshot
from tests.runtime.identity.runs import nudge
from tests.runtime.rigs.inplace_harmless import HARMLESS_CASES
from tests.runtime.rigs.inplace_modified import MODIFIED_CASES
from tests.runtime.rigs.inplace_writes import (
    NOTICED_WRITES,
    REFUSED_WRITES,
    UNNOTICED_WRITES,
    Case,
    Leave,
    Write,
    gradient,
    leaf,
    square_written_to,
)
from vdnn import _C
from vdnn.runtime.session.limits import Limits
from vdnn.runtime.session.offload import offload

pytestmark = EITHER_WAY

MODIFIED = re.compile(
    r"^one of the variables needed for gradient computation has been modified by an inplace operation: "
    r"\[(?P<kind>[\w.]+) (?P<shape>\[[\d, ]*\])\].* is at version (?P<found>\d+); expected version (?P<expected>\d+) "
    r"instead\. Hint: "
)
MODIFIED_ERROR = "modified by an inplace operation"


def name_of(case: Callable[..., object]) -> str:
    return case.__name__


@pytest.fixture(params=["still there", "gone"])
def sources_leave(request: pytest.FixtureRequest) -> bool:
    """True if the copies are made and the sources released wherever a case calls `leave`."""
    return bool(request.param == "gone")


@pytest.mark.parametrize("write", NOTICED_WRITES.values(), ids=NOTICED_WRITES)
def test_a_noticed_write_to_a_saved_tensor_is_the_error_of_plain_torch(write: Write, sources_leave: bool) -> None:
    assert MODIFIED_ERROR in same_outcome(square_written_to(write), sources_leave).error


@pytest.mark.parametrize("case", MODIFIED_CASES, ids=name_of)
def test_a_backward_through_what_was_modified_is_the_error_of_plain_torch(case: Case, sources_leave: bool) -> None:
    assert MODIFIED_ERROR in same_outcome(case, sources_leave).error


@pytest.mark.parametrize("case", HARMLESS_CASES, ids=name_of)
def test_a_harmless_write_has_the_gradients_of_plain_torch(case: Case, sources_leave: bool) -> None:
    assert same_outcome(case, sources_leave).error == ""


@pytest.mark.parametrize("write", UNNOTICED_WRITES.values(), ids=UNNOTICED_WRITES)
def test_an_unnoticed_write_has_the_gradients_of_plain_torch(write: Write, sources_leave: bool) -> None:
    assert same_outcome(square_written_to(write), sources_leave).error == ""


@pytest.mark.parametrize("write", REFUSED_WRITES.values(), ids=REFUSED_WRITES)
def test_a_refused_write_is_refused_as_in_plain_torch(write: Write, sources_leave: bool) -> None:
    error = same_outcome(square_written_to(write), sources_leave).error
    assert error
    assert MODIFIED_ERROR not in error


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.complex64], ids=str)
def test_the_error_names_every_dtype_as_plain_torch_does(dtype: torch.dtype) -> None:
    def case(leave: Leave) -> list[torch.Tensor]:
        start = torch.ones(3, dtype=dtype, requires_grad=True)
        factor = start + 0
        square = factor * factor
        leave()
        factor.detach().zero_()
        return list(torch.autograd.grad(square, start, torch.ones_like(square)))

    assert MODIFIED_ERROR in same_outcome(case, sources_leave=True).error


def test_a_write_through_data_is_not_seen_when_the_tensor_has_left_and_nobody_holds_it() -> None:
    """The runtime differs from plain PyTorch here. Like autograd, it cannot notice such a write. The copy was made
    before the write, and the memory in which the write could be seen is released."""

    def case(leave: Leave) -> list[torch.Tensor]:
        start = leaf()
        factor = start + 0
        square = factor * factor
        leave()
        factor.data.zero_()
        del factor
        return gradient(square, start)

    def unwritten(leave: Leave) -> list[torch.Tensor]:
        return square_written_to(lambda t: None)(leave)

    assert same(session_outcome_of(case, _C.Schedule.EAGER, sources_leave=False), plain_outcome_of(case))
    assert same(session_outcome_of(case, _C.Schedule.EAGER, sources_leave=True), plain_outcome_of(unwritten))


def test_a_source_that_others_hold_is_used_where_it_is() -> None:
    session = offload(device="sim", min_bytes=0, limits=Limits(offload_window=1))
    start = leaf()
    with session:
        factor = start + 0
        square, held = factor * factor, nudge()
        gradient(square, start)
    assert session.counters.copied_not_freed_bytes == factor.nbytes
    assert (session.counters.uses, session.counters.used_in_place, session.counters.reloads) == (2, 2, 0)
    del held
    session.close()


def test_a_source_that_its_owner_shrank_comes_from_the_host() -> None:
    session = offload(device="sim", min_bytes=0, limits=Limits(offload_window=1))
    start = leaf()
    with session:
        factor = start + 0
        square, held = factor * factor, nudge()
        factor.untyped_storage().resize_(0)
        (found,) = gradient(square, start)
    assert torch.equal(found, 2 * start)
    assert session.counters.reloads == 1
    del held
    session.close()


def test_data_that_is_replaced_does_not_replace_what_was_saved() -> None:
    """The runtime differs from plain PyTorch here, except for leaves: plain PyTorch saves the tensor, the runtime its
    storage."""

    def case(leave: Leave) -> list[torch.Tensor]:
        return square_written_to(lambda t: setattr(t, "data", torch.ones(4, 6)))(leave)

    def unwritten(leave: Leave) -> list[torch.Tensor]:
        return square_written_to(lambda t: None)(leave)

    for leaves in (False, True):
        ours = session_outcome_of(case, _C.Schedule.EAGER, leaves)
        assert not same(ours, plain_outcome_of(case))
        assert same(ours, plain_outcome_of(unwritten))


@dataclass(frozen=True, slots=True)
class Outcome:
    """The gradients, or the part of the error that must be the same."""

    error: str
    tensors: list[Snapshot]


def same_outcome(case: Case, sources_leave: bool) -> Outcome:
    """Runs the case plain and in a session, under every schedule. All outcomes must be the same."""
    plain = plain_outcome_of(case)
    for schedule in SCHEDULES:
        ours = session_outcome_of(case, schedule, sources_leave)
        assert ours.error == plain.error
        assert same(ours, plain)
    return plain


def same(ours: Outcome, plain: Outcome) -> bool:
    return (
        ours.error == plain.error
        and len(ours.tensors) == len(plain.tensors)
        and not any(left.difference(right) for left, right in zip(ours.tensors, plain.tensors, strict=True))
    )


def plain_outcome_of(case: Case) -> Outcome:
    return _outcome_of(case, lambda: None)


def session_outcome_of(case: Case, schedule: _C.Schedule, sources_leave: bool) -> Outcome:
    device = _C.OrderingChecker(_C.SimDevice(schedule=schedule, seed=5))
    session = offload(device=device, min_bytes=0, limits=Limits(offload_window=1, reload_window=4096))
    held: list[object] = []
    try:
        with session:
            outcome = _outcome_of(case, (lambda: held.append(nudge())) if sources_leave else (lambda: None))
            held.append(nudge())
        assert device.checked_accesses
        return outcome
    finally:
        held.clear()
        session.close()


def _outcome_of(case: Case, leave: Leave) -> Outcome:
    torch.manual_seed(0)
    try:
        return Outcome("", [Snapshot.of(tensor) for tensor in case(leave)])
    except Exception as error:
        found = MODIFIED.match(str(error))
        return Outcome(f"{type(error).__name__}: {f'{MODIFIED_ERROR} {found.groupdict()}' if found else error}", [])
