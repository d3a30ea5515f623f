"""The first steps of a session that manages a whole training keep to their budget as far as something can leave."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import vdnn
from vdnn.runtime.session.as_needed import Extent

pytestmark = pytest.mark.filterwarnings("ignore::vdnn.user_warnings.VdnnWarning")
_MIB = 1 << 20
Loss = Callable[[nn.Module, torch.Tensor], torch.Tensor]


def _trained(
    build: Callable[[], nn.Module], budget_bytes: int, rows: Sequence[int], loss: Loss, **options: bool
) -> tuple[list[int], Extent | None]:
    """The peak of each step, one for each number of rows, and what leaves in the end."""
    peaks = []
    with vdnn.VirtualMachine("rtx-4090") as machine:
        model = build()
        optimizer = torch.optim.AdamW(model.parameters(), **options)
        with vdnn.offload(budget=budget_bytes, device=machine, model=model, optimizer=optimizer) as session:
            for number in rows:
                machine.reset_peak()
                x = torch.ones(number, 1024)  # the program holds it
                loss(model, x).backward()
                optimizer.step()
                optimizer.zero_grad()
                session.step()
                peaks.append(machine.peak_bytes)
            return peaks, session._engine.extents.of(model)


def _of_squares(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def _layers(number: int) -> list[nn.Module]:
    """Each has 4 MiB of weights. Of 2,048 rows an activation takes 8 MiB."""
    return [nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(number)]


def test_a_guarded_backward_reloads_nothing_ahead_if_the_budget_has_no_room() -> None:
    """Weights, gradients, the input, a reload, the gradient that comes and the one that is made take 92 MiB. With one
    reload ahead it would be 100."""
    peaks, extent = _trained(lambda: nn.Sequential(*_layers(8)), 94 * _MIB, [2048] * 2, _of_squares)
    assert extent is Extent.STATE
    assert max(peaks) <= 94 * _MIB


def test_gradients_leave_from_the_begin_if_the_step_of_the_largest_parameter_has_no_room_beside_them() -> None:
    """Two parameters of 32 MiB each: beside weights and gradients, the state of one and the results of its step take
    128 MiB. Together that is 256 MiB, and 224 if the gradient of the other one is away."""
    two = lambda: nn.Sequential(nn.Linear(1024, 8192), nn.Linear(8192, 1024))  # noqa: E731
    peaks, extent = _trained(two, 240 * _MIB, [64] * 3, _of_squares)
    assert extent is Extent.GRADIENTS
    assert max(peaks) <= 240 * _MIB


class _WithHead(nn.Module):
    """The loss reads the weight of its head by itself, in chunks that torch checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.Sequential(*_layers(24)), nn.Linear(1024, 16384, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.layers(x).split(1024)
        parts = [checkpoint(_of_chunk, one, self.head.weight, use_reentrant=False) for one in hidden]
        return torch.stack(parts).sum()


def _of_chunk(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (hidden @ weight.t()).logsumexp(1).sum()


def test_a_step_without_a_plan_leaves_room_for_what_one_before_it_took_between_two_hooks() -> None:
    """No hook runs between the forward of the first chunk and the backward of the last one, so the first step exceeds
    the budget. More leaves from then on, and the second step has no plan either."""
    (first, second), extent = _trained(_WithHead, 630 * _MIB, [2048, 1792], lambda model, x: model(x))
    assert extent is Extent.GRADIENTS
    assert first > 630 * _MIB
    assert second <= 630 * _MIB
