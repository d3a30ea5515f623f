"""A recompute runs without graph, autocast and function modes, whatever the program has entered, and restores them."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from vdnn._C import PlainRun
from vdnn.runtime.recompute.backend_flags import backend_flags
from vdnn.runtime.recompute.surroundings import run_under


class Sees(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def state() -> tuple[object, ...]:
    return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch._C._get_torch_function_state()


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("raises", [None, ValueError, KeyboardInterrupt])
def test_modes_are_off_inside_and_as_before_behind(
    *, grad: bool, autocast: bool, raises: type[BaseException] | None
) -> None:
    weight = torch.ones(2, 2, requires_grad=True)
    inside: list[torch.Tensor] = []

    def run(tensor: torch.Tensor) -> torch.Tensor:
        inside.append(tensor @ weight)
        if raises is not None:
            raise raises
        return inside[0]

    with torch.set_grad_enabled(grad), torch.autocast("cpu", enabled=autocast), Sees() as mode:
        before = state()
        with contextlib.nullcontext() if raises is None else pytest.raises(raises):
            assert run_under(backend_flags(), run, torch.ones(2, 2)) is inside[0]
        assert state() == before
        assert torch.Tensor.matmul not in mode.seen
        assert (weight @ weight).requires_grad is grad
        assert torch.Tensor.matmul in mode.seen, "the mode is there again"
    assert inside[0].dtype is torch.float32
    assert not inside[0].requires_grad


def test_a_run_of_nothing_is_refused() -> None:
    run: Any = PlainRun(*(lambda *_: False for _ in range(7)))
    for arguments, keywords in (((), {}), ((print,), {"end": ""})):
        with pytest.raises(TypeError, match="expected a function and its arguments"):
            run(*arguments, **keywords)
    with pytest.raises(TypeError, match="expected the 7 parts"):
        PlainRun(print)  # type: ignore[call-arg]
