"""A session's records are bounded, its warnings are true, and an interrupt leaves torch unchanged."""

from __future__ import annotations

import dis
import logging
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import vdnn
from tests.runtime.conftest import OpenSession
from tests.runtime.unusual.every_mode import MODES, Step, assert_same_in
from tests.runtime.unusual.small_networks import steps_on
from vdnn.runtime.machine.virtual_machine import VirtualMachine
from vdnn.runtime.recompute.proofs import Recent

Tensor = torch.Tensor


def test_a_dictionary_forgets_what_was_asked_for_the_longest_time_ago() -> None:
    recent: Recent[int, int] = Recent(3)
    for key in range(3):
        recent[key] = key
    assert recent.get(0) == 0
    recent[3] = 3
    assert [recent.get(key) for key in range(4)] == [0, None, 2, 3]
    assert len(recent) == 3


OF_A_SCALAR: dict[str, Callable[[Tensor, float], Tensor]] = {
    "a factor": torch.mul,
    "an exponent": lambda hidden, scalar: (hidden.square() + 1).pow(scalar),
    "a slope": functional.leaky_relu,
    "a dropout probability": functional.dropout,
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("changes", OF_A_SCALAR)
def test_a_scalar_that_changes_at_every_step_leaves_the_bits_of_plain_torch(changes: str, mode: str) -> None:
    assert_same_in(mode, _with_a_scalar(changes), steps=10)


def _with_a_scalar(changes: str) -> Callable[[], Step]:
    def factory() -> Step:
        first, last = nn.Linear(16, 16), nn.Linear(16, 4)

        def loss_of(index: int) -> Tensor:
            scalar = 0.1 + index / 100
            hidden = first(torch.randn(8, 16)).tanh()
            return last(OF_A_SCALAR[changes](hidden, scalar).sin()).square().mean()  # type: ignore[no-any-return]

        return steps_on(loss_of, first, last, is_seeded=True, steps=False)

    return factory


def test_what_is_remembered_of_recipes_does_not_grow_with_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Recent.__init__, "__defaults__", (64,))
    with VirtualMachine("titan-x", fake=False) as machine:
        step = _with_a_scalar("a factor")()
        with vdnn.offload(budget="min", device=machine, min_bytes=0) as session:
            sizes = []
            for index in range(120):
                step(index)
                session.step()
                sizes.append(_remembered(session))
    assert max(sizes[60:]) == max(sizes[100:]), sizes
    assert max(sizes) <= 5 * 64


def _remembered(session: Any) -> int:
    recipes = session._engine.saves.recipes
    return len(recipes._proofs) + len(recipes._rechecks._followed) + len(recipes.readers.discarded)


def test_indices_whose_source_has_left_are_not_said_to_differ(caplog: pytest.LogCaptureFixture) -> None:
    """The producer of the indices is known only when the next operation saves. By then their source may be
    offloaded."""
    with caplog.at_level(logging.WARNING, "vdnn"), VirtualMachine("titan-x", fake=False) as machine:
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3), nn.MaxPool2d(2))
        limits = vdnn.Limits(offload_window=64, reload_window=64)
        with vdnn.offload("vdnn-all", device=machine, min_bytes=0, measure=True, limits=limits):
            for _ in range(4):
                model(torch.randn(2, 3, 20, 20)).square().sum().backward()
    assert "does not give the original" not in caplog.text


class Interrupt:
    """Raises KeyboardInterrupt at the n-th bytecode that runs inside vdnn."""

    def __init__(self, at: int) -> None:
        self._left = at
        self.has_fired = False

    def __enter__(self) -> Interrupt:
        # Python 3.12 traces bytecodes only if a frame wanted that when the trace function was set.
        sys._getframe().f_trace_opcodes = True
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not _is_ours(frame) or self.has_fired:
            return None
        frame.f_trace_opcodes = True
        return self._opcode

    def _opcode(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "opcode" and not self.has_fired:
            self._left -= 1
            if self._left <= 0 and not _is_a_destructor(frame) and not _is_at_the_edge_of_a_handler(frame):
                self.has_fired = True
                raise KeyboardInterrupt
        return self._opcode


def _is_ours(frame: FrameType) -> bool:
    """True for code of the package. A folder above it may be called vdnn as well, so a name alone does not tell."""
    return frame.f_code.co_filename.startswith(vdnn.__path__[0])


def _is_at_the_edge_of_a_handler(frame: FrameType) -> bool:
    """True ahead of an instruction that enters or leaves an exception handler. Python raises no KeyboardInterrupt
    there, and what a trace function raises there leaves the handled exception, with its frames, to the thread."""
    return dis.opname[frame.f_code.co_code[frame.f_lasti]] in ("PUSH_EXC_INFO", "POP_EXCEPT")


def _is_a_destructor(frame: FrameType | None) -> bool:
    """Tells whether Python would only print an exception raised here."""
    while frame is not None:
        if _is_ours(frame) and frame.f_code.co_name in ("__del__", "_forget", "_storage_ended", "<lambda>"):
            return True
        frame = frame.f_back
    return False


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("policy", ["vdnn-all", "recompute-all"])
def test_an_interrupt_anywhere_leaves_torch_as_it_was(open_session: OpenSession, policy: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 8))
    x = torch.randn(4, 8)

    def gradient() -> Tensor:
        model.zero_grad()
        model(x).exp().sum().backward()
        found = model[0].weight.grad
        assert found is not None
        return found.clone()

    plain, fired = gradient(), 0
    threads = torch.get_num_threads()
    for at in range(1, 12000, 97):
        session = open_session(policy)
        with session:
            try:
                with Interrupt(at) as interrupt:
                    gradient()
            except KeyboardInterrupt:
                pass
            fired += interrupt.has_fired
            assert torch.is_grad_enabled(), f"grad mode is off after an interrupt at bytecode {at}"
            assert not torch.is_autocast_enabled("cpu")
            assert torch._C._is_torch_function_enabled()
            assert torch.get_num_threads() == threads
            assert torch.equal(gradient(), plain), at
        assert torch._C._len_torch_function_stack() == 0
        if not interrupt.has_fired:
            break
    assert fired > 20
