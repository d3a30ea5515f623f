"""On request, a violation says where in the program each of its two accesses was issued."""

from __future__ import annotations

import inspect

import pytest
import torch

import vdnn
from deferred import DeferredAccelerator, Mode
from tests.deferred.faulty_offloaders import Naive
from tests.runtime.rigs.networks import perceptron
from vdnn import _C


def line_of(function: object, text: str) -> str:
    """The line of the function that contains the text, in the format of a stack: file, line and function."""
    lines, first = inspect.getsourcelines(function)  # type: ignore[arg-type]
    (offset,) = [index for index, line in enumerate(lines) if text in line]
    return f"{inspect.getsourcefile(function)}:{first + offset} in {function.__name__}"  # type: ignore[arg-type,attr-defined]


def produced() -> torch.Tensor:
    return torch.ones(1000, device="deferred")  # the write


def read_elsewhere(x: torch.Tensor) -> torch.Tensor:
    with torch.Stream(device="deferred"):
        return x * 3  # the read that waits for nobody


def freed_too_early(x: torch.Tensor) -> torch.Tensor:
    side = torch.Stream(device="deferred")
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        y = x.mul(5)  # the read that is still to come
    x.untyped_storage().resize_(0)  # the release
    return y


@pytest.mark.parametrize("mode", [Mode.COMPUTE_LATE, Mode.RANDOM], ids=["compute_late", "random"])
def test_both_sides_name_their_file_and_line(mode: Mode) -> None:
    with DeferredAccelerator(mode, stacks=True) as accelerator:
        read = read_elsewhere(produced())
        violations = accelerator.violations
        del read
    assert violations[0].first_issued_at.startswith(line_of(produced, "the write"))
    assert violations[0].second_issued_at.startswith(line_of(read_elsewhere, "the read"))
    assert test_both_sides_name_their_file_and_line.__name__ in violations[0].first_issued_at, "and who called it"
    assert line_of(read_elsewhere, "the read") in repr(violations[0])
    assert torch.__file__.rsplit("/", 1)[0] not in violations[0].second_issued_at


def test_memory_that_is_let_go_of_says_where() -> None:
    def let_go() -> None:
        x = torch.ones(1000, device="deferred")
        with side:
            held.append(x * 3)
        del x  # the release

    with DeferredAccelerator(stacks=True) as accelerator:
        side, held = torch.Stream(device="deferred"), []
        let_go()
        violation = next(found for found in accelerator.violations if "release" in found.second)
        held.clear()
    assert violation.second_issued_at.startswith(line_of(let_go, "the release"))


def test_a_fault_in_an_unpack_hook_names_the_hook_and_the_backward() -> None:
    def step(model: torch.nn.Module, x: torch.Tensor) -> None:
        with Naive(mended=False):
            loss = model(x).square().sum()
        loss.backward()  # type: ignore[no-untyped-call] # where it is called

    with DeferredAccelerator(Mode.RANDOM, stacks=True) as accelerator:
        model, x = perceptron().to("deferred"), torch.randn(4, 16).to("deferred")
        step(model, x)
        del model, x
    places = [found.second_issued_at for found in accelerator.violations]
    assert any(place.startswith(line_of(Naive.reload, "target.copy_")) for place in places), places
    in_backward = [place for place in places if "Backward0 of" in place]
    assert in_backward
    assert all(line_of(step, "where it is called") in place for place in in_backward)


def test_what_the_runtime_issues_is_issued_where_the_program_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses a faulty runtime that takes another stream for the current one."""

    def step(x: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
        return [x.exp() * weight for _ in range(3)]  # saved here

    with DeferredAccelerator(Mode.COMPUTE_LATE, stacks=True) as accelerator:
        weight, x = torch.ones(64, device="deferred", requires_grad=True), torch.ones(64).to("deferred")
        another, right = accelerator.device.create_stream("another"), DeferredAccelerator.current_stream
        with vdnn.offload("vdnn-all", device=accelerator, min_bytes=0, limits=vdnn.Limits(offload_window=1)) as session:
            monkeypatch.setattr(DeferredAccelerator, "current_stream", lambda self: (right(self), another)[1])
            results = step(x, weight)
            monkeypatch.undo()
        violations = [found for found in accelerator.violations if "by producer" in found.second]
        del results, weight, x
        session.close()
    assert violations
    assert all(line_of(step, "saved here") in found.second_issued_at for found in violations)


def test_without_asking_nothing_is_said() -> None:
    with DeferredAccelerator() as accelerator:
        read = read_elsewhere(produced())
        (violation, *_) = accelerator.violations
        del read
    assert (violation.first_issued_at, violation.second_issued_at) == ("", "")
    assert " at " not in repr(violation)


def test_an_origin_is_its_threads_and_its_checkers() -> None:
    device = _C.SimDevice()
    checker, other = (_C.OrderingChecker(device, _C.OnViolation.COLLECT) for _ in range(2))
    streams = [device.create_stream(name) for name in ("left", "right")]
    checker.set_origin("here")
    for each in (checker, other):
        for stream in streams:
            each.note_access(4096, 8, _C.Access.WRITE, stream)
    (told,), (untold,) = checker.take_violations(), other.take_violations()
    device.close()
    assert (told.first_issued_at, told.second_issued_at) == ("here", "here")
    assert (untold.first_issued_at, untold.second_issued_at) == ("", "")
