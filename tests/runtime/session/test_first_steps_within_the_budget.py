"""The first steps of a session that manages a whole training keep to their budget as far as something can leave."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import vdnn
from vdnn.runtime.session.as_needed import Extent

pytestmark = pytest.mark.filterwarnings("ignore::vdnn.user_warnings.VdnnWarning")
_MIB = 1 << 20
Loss = Callable[[nn.Module, torch.Tensor], torch.Tensor]


class _WithMuchState(torch.optim.Optimizer):
    """Keeps six tensors of each parameter's size, of which no rule of thumb knows."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state |= {} if state else {f"old {number}": torch.zeros_like(parameter) for number in range(6)}
            state["old 0"].copy_(parameter.grad)
            parameter.add_(state["old 0"], alpha=-self.param_groups[0]["lr"])


def _trained(
    build: Callable[[], nn.Module],
    budget_bytes: int,
    rows: Sequence[int],
    loss: Loss,
    optimizes: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
) -> tuple[list[int], Extent | None]:
    """The peak of each step, one for each number of rows, and what leaves in the end."""
    peaks = []
    with vdnn.VirtualMachine("rtx-4090") as machine:
        model = build()
        optimizer = optimizes(model.parameters())
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


def test_the_step_of_an_optimizer_is_tried_without_data_as_the_session_begins() -> None:
    """The same parameters: the state of one takes 192 MiB. Together that is 320 MiB, and 288 if the gradient of the
    other one is away."""
    two = lambda: nn.Sequential(nn.Linear(1024, 8192), nn.Linear(8192, 1024))  # noqa: E731
    peaks, extent = _trained(two, 300 * _MIB, [64] * 3, _of_squares, _WithMuchState)
    assert extent is Extent.GRADIENTS
    assert max(peaks) <= 300 * _MIB


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
    """No hook runs in a chunk, and the backward of one takes four times its logits, where its forward took one. So the
    first step exceeds the budget. More leaves from then on, and the second step has no plan either."""
    (first, second), extent = _trained(_WithHead, 630 * _MIB, [2048, 1792], lambda model, x: model(x))
    assert extent is Extent.GRADIENTS
    assert first > 630 * _MIB
    assert second <= 630 * _MIB


def _with_little_host_memory(
    *, fake: bool, width: int, budget_bytes: int, host_bytes: int
) -> tuple[list[int], list[int], list[torch.Tensor]]:
    """Two steps of 16 layers: their peaks, how many storages were discarded until then, and the weights."""
    torch.manual_seed(0)
    with vdnn.VirtualMachine("rtx-4090", fake=fake) as machine:
        model = nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(16)])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        narrow = max(2 * width * width * 4 * 2, 4096)  # two storages
        limits = vdnn.Limits(host_budget=host_bytes, offload_window=narrow, reload_window=narrow)
        peaks, discarded = [], []
        with vdnn.offload(budget=budget_bytes, device=machine, min_bytes=0, limits=limits) as session:
            for _ in range(2):
                machine.reset_peak()
                x = torch.linspace(-1, 1, 2 * width * width).reshape(2 * width, width)
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                session.step()
                peaks.append(machine.peak_bytes)
                discarded.append(session.counters.discarded)
                assert fake or session._engine.rechecks.compared >= discarded[0]
        return peaks, discarded, [one.detach() for one in model.parameters()]


def test_storages_are_recomputed_before_the_host_has_no_memory_for_more() -> None:
    """33 storages of 8 MiB are saved, and the host has room for 8 of them."""
    peaks, discarded, _ = _with_little_host_memory(fake=True, width=1024, budget_bytes=240 * _MIB, host_bytes=64 * _MIB)
    assert max(peaks) <= 240 * _MIB
    assert discarded[0] > 0


def test_a_chain_of_recomputes_makes_no_more_than_there_is_room_for() -> None:
    """Each of 32 results of 8 MiB can be recomputed from the one before. If none but the first were kept, the first use
    in backward would make all of them."""
    with vdnn.VirtualMachine("rtx-4090") as machine:
        model = nn.Sequential(nn.Linear(1024, 1024), *[nn.Tanh() for _ in range(32)])
        limits = vdnn.Limits(host_budget="16MiB", offload_window="16MiB", reload_window="16MiB")
        with vdnn.offload(budget="128MiB", device=machine, limits=limits) as session:
            model(torch.ones(2048, 1024)).sum().backward()
            assert session.counters.discarded > 16
        assert machine.peak_bytes <= 128 * _MIB


def test_a_step_that_discards_because_the_host_runs_short_has_the_bits_of_plain_pytorch() -> None:
    """The same in small, with values: each value that is recomputed is compared with a hash of the one before."""
    _, (discarded, *_), weights = _with_little_host_memory(
        fake=False, width=64, budget_bytes=1200 << 10, host_bytes=256 << 10
    )
    assert discarded > 0
    _, (nothing, *_), expected = _with_little_host_memory(
        fake=False, width=64, budget_bytes=64 * _MIB, host_bytes=64 * _MIB
    )
    assert not nothing
    assert all(map(torch.equal, weights, expected))
