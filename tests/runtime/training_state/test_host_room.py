"""Plans of sessions that manage training state leave its part of the host's memory to it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import vdnn

pytestmark = pytest.mark.filterwarnings("ignore::vdnn.VdnnWarning")  # the first step has no plan

STATE_BYTES = 96 << 20  # of AdamW for the blocks, rounded up
STEPS = 5


class Block(nn.Module):
    def __init__(self, *, is_recomputed: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(512, 2048), nn.Linear(2048, 512)
        self.is_recomputed = is_recomputed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = nn.functional.gelu(self.up(x))
        found: torch.Tensor = self.down(h if self.is_recomputed else h.cumsum(1).sigmoid())
        return found


@contextmanager
def training(*, is_recomputed: bool = True) -> Iterator[tuple[vdnn.VirtualMachine, Any, Any, Any]]:
    with vdnn.VirtualMachine("rtx-4090") as machine:
        model, x = nn.Sequential(*[Block(is_recomputed=is_recomputed) for _ in range(6)]), torch.ones(4096, 512)
        optimizer = torch.optim.AdamW(model.parameters())

        def step() -> int:
            machine.reset_peak()
            loss: torch.Tensor = model(x).square().mean()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            return machine.peak_bytes

        yield machine, model, optimizer, step


def peak_of(**options: Any) -> int:
    with training(**options) as (_, _, _, step):
        step()
        found: int = step()
        return found


def peaks_under(budget: int, host: str, **options: Any) -> tuple[list[int], int]:
    """The peaks of a session's steps, and what its plan offloads."""
    with training(**options) as (machine, model, optimizer, step):
        given: dict[str, Any] = {"device": machine, "model": model, "optimizer": optimizer}
        with vdnn.offload(budget=budget, limits=vdnn.Limits(host_budget=host), **given) as session:
            peaks = []
            for _ in range(STEPS):
                peaks.append(step())
                session.step()
        assert session.plan is not None
        return peaks, session.plan.offloaded_bytes


@pytest.mark.parametrize("host", ["130MiB", "100MiB"])
def test_steps_keep_to_their_budget_where_state_fills_the_host(host: str) -> None:
    budget = int(0.6 * peak_of())
    peaks, offloaded_bytes = peaks_under(budget, host)
    assert max(peaks) <= budget
    assert STATE_BYTES + offloaded_bytes <= (vdnn.Limits(host_budget=host).host_bytes or 0)


def test_a_host_that_is_too_small_beside_the_state_is_refused_with_both_numbers() -> None:
    budget = int(0.5 * peak_of(is_recomputed=False))
    wanted = r"host_budget 100.00 MiB is too small: .* beside 9\d.* of training state"
    with pytest.raises(vdnn.VdnnError, match=wanted):
        peaks_under(budget, "100MiB", is_recomputed=False)
