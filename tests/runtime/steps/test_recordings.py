"""A recording shows the saves and uses of a step as if everything was kept, whatever policy ran."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import vdnn
from tests.runtime.rigs.virtual_training import MODELS, trained_virtually
from vdnn.planning.least_memory import least_bytes
from vdnn.runtime.machine.virtual_machine import VirtualMachine
from vdnn.runtime.steps.planner import SLACK
from vdnn.step.recording import PointKind, Recording


def recorded(name: str, policy: str, **options: str) -> Recording:
    recording = trained_virtually(name, policy, **options).recording
    assert recording is not None
    return recording


@pytest.mark.parametrize("name", MODELS)
def test_what_was_moved_is_put_back_on_paper(name: str) -> None:
    """Every point, byte and nanosecond is the same under any policy and any window."""
    kept = recorded(name, "keep")
    assert kept.lifetimes, "nothing was recorded"
    assert recorded(name, "vdnn-all") == kept
    assert recorded(name, "vdnn-all", offload_window="1KiB", reload_window="1KiB") == kept
    assert recorded(name, "vdnn-conv") == kept


class Parts(nn.Module):
    """Squares parts of one product. Each part is saved, and holds the whole product."""

    def __init__(self, parts: int) -> None:
        super().__init__()
        self.parts = parts
        self.product = nn.Linear(64, 192)
        self.behind = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.product(x).chunk(3, -1)[: self.parts]
        squares: torch.Tensor = sum((part * part for part in made), torch.zeros(()))
        out: torch.Tensor = self.behind(squares).tanh()
        return out


def encoder() -> nn.Module:
    """A model whose attention saves one of three parts of one product."""
    return nn.Sequential(*(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True) for _ in range(3)))


HELD_IN_PART = {
    "one of three": lambda: (nn.Sequential(*(Parts(1) for _ in range(4))), (torch.randn(128, 64),)),
    "all of three": lambda: (nn.Sequential(*(Parts(3) for _ in range(4))), (torch.randn(128, 64),)),
    "attention": lambda: (encoder(), (torch.randn(4, 32, 64),)),
}


@pytest.mark.drawn(of=2)
@pytest.mark.parametrize("name", HELD_IN_PART)
def test_a_part_that_is_saved_holds_the_whole_storage(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The bytes are those with everything kept, whatever policy ran. The predicted peak of a plan is never too low."""
    monkeypatch.setitem(MODELS, name, HELD_IN_PART[name])
    kept = recorded(name, "keep")
    moved = recorded(name, "vdnn-all", offload_window="1KiB", reload_window="1KiB")
    assert [point.allocated_bytes for point in moved.points] == [point.allocated_bytes for point in kept.points]
    assert [point.peak_bytes for point in moved.points] == [point.peak_bytes for point in kept.points]
    for part in (0.3, 0.6, 0.9):
        budget_bytes = least_bytes(moved) + round(part * (moved.peak_bytes - least_bytes(moved)))
        session = trained_virtually(name, "auto", budget=budget_bytes, steps=4, recompute=False)
        assert session.timeline is not None
        assert session.timeline.peak_bytes <= budget_bytes
        assert session.plan is not None
        assert session.plan.budget_bytes == int(budget_bytes * (1 - SLACK)), "it did not have to be planned again"


def test_of_a_chain_it_can_be_said_by_hand() -> None:
    """x -> tanh -> tanh -> sum: two maps of 4,000 bytes, each saved once, used in reverse."""
    with VirtualMachine("titan-x") as machine:
        x = torch.randn(1000, requires_grad=True)
        with vdnn.offload("vdnn-all", device=machine, min_bytes=0, measure=True, warmup_steps=0) as session:
            x.tanh().tanh().sum().backward()
            session.step()
    recording = session.recording
    assert recording is not None
    kinds = [(point.kind, point.lifetime) for point in recording.points]
    save, use, end = PointKind.SAVE, PointKind.USE, PointKind.END
    assert kinds == [(save, 0), (save, 1), (use, 1), (use, 0), (end, None)]
    assert [one.nbytes for one in recording.lifetimes] == [4000, 4000]
    assert [(one.saves, one.uses) for one in recording.lifetimes] == [((0,), (3,)), ((1,), (2,))]
    # The next operation holds each result while it runs: the first result until after the save of the second.
    assert [one.free_point for one in recording.lifetimes] == [2, 2]
    assert [one.end_point for one in recording.lifetimes] == [4, 3]
    # x, and one more result at each save. After the sum: x, both results, the sum and its gradient of one number each;
    # the gradient of the second result is computed before the second result is released.
    one_map, number = 4000, 4
    assert [point.allocated_bytes for point in recording.points[:2]] == [2 * one_map, 3 * one_map]
    assert recording.points[3].peak_bytes == 4 * one_map + 2 * number
    keys = [point.key for point in recording.points[:2]]
    assert [key.producer for key in keys if key is not None] == ["TanhBackward0"] * 2
    assert [key.occurrence for key in keys if key is not None] == [0, 1]


def test_compute_time_is_without_stalls() -> None:
    """Tiny windows make the stream wait; the recorded step is as long as with everything kept."""
    narrow = trained_virtually("perceptron", offload_window="1KiB", reload_window="1KiB")
    assert narrow.timeline is not None
    assert narrow.recording is not None
    assert narrow.timeline.stall_ns > 0
    assert narrow.recording.compute_ns == narrow.timeline.step_ns - narrow.timeline.stall_ns


def test_a_storage_that_the_program_holds_is_known_to_be_held() -> None:
    with VirtualMachine("titan-x") as machine:
        x = torch.randn(1000, requires_grad=True)
        with vdnn.offload("vdnn-all", device=machine, min_bytes=0, measure=True, warmup_steps=0) as session:
            held = x.tanh()
            held.tanh().sum().backward()
            session.step()
    assert session.recording is not None
    first, second = session.recording.lifetimes
    assert first.free_point == first.end_point or first.free_point > first.uses[-1]
    assert second.free_point <= second.uses[0]
    assert "held by somebody else for its whole lifetime: 3.91 KiB" in session.report()
    assert held.shape == (1000,)


def test_a_report_says_when_the_peak_is_where_nothing_can_move() -> None:
    """The peak is after the backward, as in an optimizer's step: saved tensors are not the cause."""

    def report(after_backward: int) -> str:
        with VirtualMachine("titan-x") as machine:
            x = torch.randn(1000, requires_grad=True)
            with vdnn.offload("vdnn-all", device=machine, min_bytes=0, measure=True, warmup_steps=0) as session:
                x.tanh().tanh().tanh().sum().backward()
                torch.empty(after_backward)
                session.step()
        return session.report()

    assert "offloading cannot lower" not in report(1)
    (line,) = [line for line in report(1 << 20).splitlines() if "offloading cannot lower" in line]
    assert "the peak of 4.0" in line
    assert line.endswith("where nothing that was saved is left to move")


def test_views_and_shared_saves_are_one_lifetime() -> None:
    with VirtualMachine("titan-x") as machine:
        x = torch.randn(32, 32, requires_grad=True)
        with vdnn.offload("vdnn-all", device=machine, min_bytes=0, measure=True, warmup_steps=0) as session:
            y = x.tanh()  # saved as a result, as an operand twice, and as its transpose
            (y * y.t()).sum().backward()
            session.step()
    assert session.recording is not None
    (lifetime,) = session.recording.lifetimes
    assert len(lifetime.saves) == 3
    assert len(lifetime.uses) == 3


def test_modules_are_named_as_the_model_names_them() -> None:
    recording = recorded("resnet", "vdnn-all")
    modules = {point.key.module for point in recording.points if point.key is not None}
    # the fourth of the sequence is a residual block, which has a convolution of this name
    assert "3.first" in modules, modules
    assert nn.Module.__name__ not in modules


def test_it_survives_the_way_to_a_file_and_back(tmp_path: Path) -> None:
    recording = recorded("join", "vdnn-all")
    recording.save(tmp_path / "step.json")
    assert Recording.load(tmp_path / "step.json") == recording
    assert [path.name for path in tmp_path.iterdir()] == ["step.json"]
