"""A training on several cards: the shards of one rank to the byte, its collectives, and its peak beside FSDP2's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import vdnn
from tests import forked
from vdnn.errors import InvalidArgumentError
from vdnn.hardware import load_profile
from vdnn.planning.training.cycle import cycle_of
from vdnn.planning.training.placement import UnitPlacement, all_alike
from vdnn.runtime.rehearsal.ranks import on_one_rank, ranks_of
from vdnn.runtime.rehearsal.rehearsal import subject_of
from vdnn.runtime.rehearsal.rehearsed_training import RehearsedTraining, rehearse_training

H100 = load_profile("h100")
WIDTH, LAYERS, OUT, FLOAT = 66, 3, 7, 4  # rows that two and four do not divide


class Layer(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.relu(self.up(x)))
        return out


class Net(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(LAYERS))
        self.head = nn.Linear(width, OUT)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        out: torch.Tensor = self.head(x)
        return out


def build(batch: int) -> tuple[nn.Module, torch.Tensor]:
    return Net(), torch.randn(batch, WIDTH)


def rehearsed(batch: int = 32) -> RehearsedTraining:
    return rehearse_training(subject_of(build, batch), H100, name="net", optimizer="adamw")


def padded(ranks: int) -> list[int]:
    """The numbers that one rank holds of a layer and of the head: rows are padded to a multiple of the ranks."""
    up, down, out = (-(-rows // ranks) for rows in (3 * WIDTH, WIDTH, OUT))
    return [up * WIDTH + up + down * 3 * WIDTH + down] * LAYERS + [out * WIDTH + out]


def test_a_rank_holds_its_padded_rows_of_everything() -> None:
    ranks = ranks_of(H100, 4, "fsdp2")
    assert ranks is not None
    whole = rehearsed()
    one = on_one_rank(whole, ranks).training
    owners = [unit for unit in one.units if unit.weight_bytes]
    assert [unit.weight_bytes for unit in owners] == [FLOAT * numbers for numbers in padded(4)]
    assert [unit.gradient_bytes for unit in owners] == [FLOAT * numbers for numbers in padded(4)]
    counts = [4 * FLOAT] * LAYERS + [2 * FLOAT]  # a step count for each tensor, which no rank cuts
    moments = [unit.state_bytes - 2 * unit.gradient_bytes for unit in owners]
    assert all(0 <= more <= count for more, count in zip(moments, counts, strict=True))


def test_collectives_are_rings_over_the_link_between_cards() -> None:
    ranks = ranks_of(H100, 4, "fsdp2")
    assert ranks is not None
    share = on_one_rank(rehearsed(), ranks).rank
    assert share is not None
    layer, head = padded(4)[0], padded(4)[-1]
    assert share.gathered_bytes == 4 * FLOAT * (2 * LAYERS * layer + head)
    assert share.reduced_bytes == 4 * FLOAT * (LAYERS * layer + head)
    ring_ns = (share.gathered_bytes + share.reduced_bytes) * 3 / 4 / 360e9 * 1e9
    assert share.collective_ns == pytest.approx(ring_ns, abs=1)
    assert 0 < share.waited_ns <= share.collective_ns + 10 * LAYERS


def test_ddp_cuts_nothing_and_reduces_in_buckets() -> None:
    ranks = ranks_of(H100, 8, "ddp")
    assert ranks is not None
    whole = rehearsed()
    one = on_one_rank(whole, ranks)
    gradients = sum(unit.gradient_bytes for unit in whole.training.units)
    assert one.training.fixed_bytes - whole.training.fixed_bytes == gradients
    assert [unit.weight_bytes for unit in one.training.units] == [unit.weight_bytes for unit in whole.training.units]
    assert one.rank is not None
    assert one.rank.gathered_bytes == 0
    assert one.rank.collective_ns == pytest.approx(2 * 7 / 8 * gradients / 360e9 * 1e9, abs=1)


def test_what_contradicts_is_refused_with_both_names() -> None:
    with pytest.raises(ValueError, match="shard: expected ranks beside it"):
        ranks_of(H100, None, "ddp")
    with pytest.raises(InvalidArgumentError, match="ranks: expected a number of cards, 2 or more, got 1"):
        ranks_of(H100, 1, None)
    with pytest.raises(InvalidArgumentError, match="shard: expected one of fsdp2, ddp, got 'zero3'"):
        ranks_of(H100, 2, "zero3")


def test_a_report_says_ranks_in_words_and_in_json(tmp_path: Path) -> None:
    report = vdnn.plan_training(build, 32, hardware="rtx-4090", optimizer="adamw", ranks=2)
    assert "each of 2 ranks under fsdp2" in str(report)
    assert "between cards; it waits" in str(report)
    assert "no link between cards" in report.notes[0]
    assert report.as_json()["rank"]["ranks"] == 2
    report.save(tmp_path / "plan.json")
    assert vdnn.TrainingReport.load(tmp_path / "plan.json") == report


@pytest.mark.slow
def test_the_peak_of_a_rank_is_that_of_fsdp2_over_a_fake_process_group() -> None:
    """FSDP2 itself, without data: its allocations are counted, and its collectives move nothing."""
    width, batch, ranks = 256, 512, 8

    def wide(batch: int) -> tuple[nn.Module, torch.Tensor]:
        return Net(width), torch.randn(batch, width)

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        mesh = init_device_mesh("cpu", (ranks,))
        with vdnn.VirtualMachine("h100") as machine:
            model, inputs = wide(batch)
            for layer in model.layers:  # type: ignore[union-attr]
                fully_shard(layer, mesh=mesh)  # type: ignore[arg-type]
            fully_shard(model, mesh=mesh)
            for _ in range(2):
                machine.reset_peak()
                model(inputs).float().square().sum().backward()
                model.zero_grad()
            seen = machine.peak_bytes
    finally:
        dist.destroy_process_group()
    cards = ranks_of(H100, ranks, "fsdp2")
    assert cards is not None
    whole = rehearse_training(subject_of(wide, batch), H100, name="wide", optimizer="sgd")
    one = on_one_rank(whole, cards).training
    libraries_bytes = H100.libraries["cublas_bytes"]  # the virtual machine counts tensors alone
    derived = max(cycle_of(one, all_alike(one, UnitPlacement())).needed_bytes) - libraries_bytes
    assert seen <= derived <= 1.2 * seen


PROGRAM = """
import json, os, sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from tests.runtime.rehearsal.test_ranks import build

rank, place = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{place}/meeting", rank=rank, world_size=2)
model, inputs = build(4)
mesh = init_device_mesh("cpu", (2,))
for layer in model.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters())
model(inputs).square().sum().backward()
optimizer.step()
local = lambda one: one.to_local().numel() * one.itemsize
found = {
    "parameters": sum(local(one) for one in model.parameters()),
    "gradients": sum(local(one.grad) for one in model.parameters()),
    "moments": sum(local(state[name]) for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")),
}
dist.destroy_process_group()
if rank == 0:
    print(json.dumps(found))
"""


@pytest.mark.slow
def test_a_real_run_on_two_ranks_holds_the_shards_that_were_derived(tmp_path: Path) -> None:
    other, first = (
        forked.start(
            forked.run_code, PROGRAM, rank, str(tmp_path), folder=tmp_path, environment={"GLOO_SOCKET_IFNAME": "lo"}
        )
        for rank in ("1", "0")
    )
    first, other = first.end(), other.end()
    assert other.returncode == 0, other.stderr
    assert first.returncode == 0, first.stderr
    seen = json.loads(first.stdout.splitlines()[-1])
    ranks = ranks_of(H100, 2, "fsdp2")
    assert ranks is not None
    units = on_one_rank(rehearsed(4), ranks).training.units
    numbers = sum(padded(2))
    assert seen == {"parameters": FLOAT * numbers, "gradients": FLOAT * numbers, "moments": 2 * FLOAT * numbers}
    assert sum(unit.weight_bytes for unit in units) == seen["parameters"]
    assert sum(unit.gradient_bytes for unit in units) == seen["gradients"]
