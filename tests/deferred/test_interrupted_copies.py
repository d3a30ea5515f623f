"""An interrupt between the issue of a copy of training state and the line that notes it: the memory of the copy is not
given to others before the copy is over."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn

import vdnn
from deferred import DeferredAccelerator, Mode
from tests.runtime.training_state.conftest import NARROW
from tests.runtime.training_state.ways import options_of
from vdnn.runtime.training_state.state_copies import StateCopies

# Each run here draws others of the combinations of a way and a mode.
pytestmark = pytest.mark.drawn(of=2)

STEPS = 6


class Interrupted(BaseException):
    """As KeyboardInterrupt, but of the test alone."""


def interrupted_run(mode: Mode, monkeypatch: pytest.MonkeyPatch, way: str, at: int) -> tuple[int, list[Any]]:
    """A training that goes on behind an interrupt right after copy `at` of its steps was issued. Returns the number of
    copies, and what the accelerator found."""
    issued, issue = at, StateCopies._issue

    def interrupted(self: StateCopies, *args: Any) -> bool:
        nonlocal issued
        is_done, issued = issue(self, *args), issued + 1
        if issued == at:
            raise Interrupted
        return is_done

    with (
        monkeypatch.context() as patched,
        DeferredAccelerator(mode, seed=at, capacity="8MiB") as accelerator,
        contextlib.ExitStack() as sessions,
    ):
        patched.setattr(StateCopies, "_issue", interrupted)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)).to("deferred")
        optimizer = torch.optim.AdamW(model.parameters(), fused=False, foreach=False)
        options: Any = {"device": accelerator, "min_bytes": 0, "limits": NARROW, **options_of(way, model)}
        session = sessions.enter_context(contextlib.closing(vdnn.offload("vdnn-all", optimizer=optimizer, **options)))
        with session:
            issued = 0
            for _ in range(STEPS):
                with contextlib.suppress(Interrupted, vdnn.VdnnError):  # an interrupted step says so
                    model(torch.ones(4, 16).to("deferred")).square().mean().backward()
                    optimizer.step()
                optimizer.zero_grad()
        accelerator.synchronize()
        return issued, accelerator.violations


@pytest.mark.parametrize("way", ["state", "gradients", "all", "on the cpu"])
def test_memory_of_a_copy_that_nobody_noted_is_not_given_to_others(
    way: str, mode: Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies, _ = interrupted_run(mode, monkeypatch, way, 0)
    assert copies > STEPS
    for at in range(1, copies, max(1, copies // 8)):
        assert interrupted_run(mode, monkeypatch, way, at)[1] == [], f"interrupted behind copy {at}"
