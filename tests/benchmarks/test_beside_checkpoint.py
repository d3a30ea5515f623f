"""Compares auto with torch's checkpointing, on a network small enough for a test."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks.models.workload import Workload
from benchmarks.plans import beside_checkpoint


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.LayerNorm(1024), nn.Linear(1024, 256))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        summed: torch.Tensor = x + self.body(x)
        return summed


def blocks(batch: int) -> Workload:
    return Workload(nn.Sequential(*(Block() for _ in range(6))), (torch.randn(batch, 256),), lambda y: y.square().sum())


@pytest.mark.slow
def test_the_same_memory_costs_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(beside_checkpoint.NETWORKS, "blocks", (blocks, 8192))
    monkeypatch.setitem(beside_checkpoint.BLOCKS, "blocks", ("Block",))
    cell = beside_checkpoint.compare("blocks", "h100")
    assert cell["checkpoint_peak_bytes"] < cell["keep_peak_bytes"]
    assert cell["checkpoint_ns"] > cell["keep_ns"]
    assert cell["auto"]["peak_bytes"] <= cell["budget_bytes"]
    assert cell["auto"]["step_ns"] <= cell["auto-offload"]["step_ns"]
    assert cell["auto"]["step_ns"] < cell["checkpoint_ns"]
    assert "slower than checkpointing in 0 of 1" in beside_checkpoint.render([cell])


def test_a_network_without_such_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="expected blocks of Bottleneck"):
        beside_checkpoint.run_checkpointed(blocks, 4, "h100", ("Bottleneck",))


def test_an_unknown_network_is_refused() -> None:
    with pytest.raises(SystemExit, match="expected networks among resnet50"):
        beside_checkpoint.main(["--networks", "nothing"])
