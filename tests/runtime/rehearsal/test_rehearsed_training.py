"""A training made from a rehearsed step has the bytes of the model's modules, and the peak of the rehearsal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from vdnn.hardware import load_profile
from vdnn.planning.training.cycle import cycle_of
from vdnn.planning.training.placement import UnitPlacement, all_alike
from vdnn.runtime.rehearsal.rehearsal import rehearse, subject_of
from vdnn.runtime.rehearsal.rehearsed_training import RehearsedTraining, rehearse_training
from vdnn.runtime.rehearsal.unit_modules import blocks_of

H100 = load_profile("h100")
WIDTH, TOKENS, WORDS, LAYERS = 256, 64, 1000, 4
BLOCK_WEIGHTS = 2 * WIDTH * 4 * WIDTH + 4 * WIDTH + WIDTH + 2 * WIDTH


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.mlp(self.norm(x))
        return out


class Words(nn.Module):
    def __init__(self, *, is_tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if is_tied:
            self.head.weight = self.embedding.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words)
        for layer in self.layers:
            x = layer(x)
        out: torch.Tensor = self.head(x)
        return out


def words(batch: int) -> Any:
    return Words(), torch.zeros(batch, TOKENS, dtype=torch.long)


def tied(batch: int) -> Any:
    return Words(is_tied=True), torch.zeros(batch, TOKENS, dtype=torch.long)


def convolutions(batch: int) -> Any:
    layers = [nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*layers), torch.zeros(batch, 3, 32, 32)


def one_layer(batch: int) -> Any:
    return nn.Linear(512, 512), torch.zeros(batch, 512)


def rehearsed(make: Callable[[int], Any], batch: int = 32, **options: Any) -> RehearsedTraining:
    return rehearse_training(subject_of(make, batch), H100, name="a model", **({"optimizer": "adamw"} | options))


@pytest.mark.parametrize("make", [words, tied, convolutions, one_layer])
def test_the_peak_of_the_cycle_is_that_of_the_rehearsal(make: Callable[[int], Any]) -> None:
    found = rehearsed(make)
    recorded = rehearse(subject_of(make, 32), H100, min_bytes=0).recording
    assert found.rehearsed_peak_bytes == recorded.peak_bytes
    assert 0 <= found.cycle_peak_bytes / found.rehearsed_peak_bytes - 1 < 0.01


def test_units_are_the_blocks_and_what_is_around_them() -> None:
    found = rehearsed(words)
    names = [unit.name for unit in found.training.units]
    assert names == ["before layers", *(f"layers.{i}" for i in range(LAYERS)), "after layers"]
    assert found.blocks == tuple(range(1, LAYERS + 1))
    first, block, last = found.training.units[0], found.training.units[2], found.training.units[-1]
    assert first.weight_bytes == last.weight_bytes == 4 * WORDS * WIDTH
    assert block.weight_bytes == block.gradient_bytes == 4 * BLOCK_WEIGHTS
    # Two moments for each parameter, and the number of its steps, a float32 for each of its six tensors.
    assert block.state_bytes == 8 * BLOCK_WEIGHTS + 6 * 4
    rows = 32 * TOKENS
    # The input, the normalized one with mean and deviation, and both sides of GELU.
    assert block.saved_bytes == 4 * rows * (WIDTH + WIDTH + 2 + 2 * 4 * WIDTH)
    assert block.boundary_bytes == 4 * rows * WIDTH


def test_a_tied_weight_stays_and_its_gradient_is_of_the_last_unit() -> None:
    plain, found = rehearsed(words).training, rehearsed(tied).training
    assert found.units[0].parameter_bytes == found.units[-1].parameter_bytes == 0
    assert found.units[0].gradient_bytes == 0
    assert found.units[-1].gradient_bytes == 4 * WORDS * WIDTH
    assert found.fixed_bytes - plain.fixed_bytes == 4 * WORDS * WIDTH


def test_frozen_parameters_have_neither_gradient_nor_state() -> None:
    def frozen(batch: int) -> Any:
        model, inputs = words(batch)
        model.embedding.requires_grad_(False)
        model.layers[0].requires_grad_(False)
        return model, inputs

    units = rehearsed(frozen).training.units
    assert (units[1].frozen_bytes, units[1].weight_bytes, units[1].state_bytes) == (4 * BLOCK_WEIGHTS, 0, 0)
    assert units[0].backward_ns == 0
    assert units[2].gradient_bytes == 4 * BLOCK_WEIGHTS


def test_master_weights_are_part_of_the_state() -> None:
    def half(batch: int) -> Any:
        model, inputs = words(batch)
        return model.to(torch.bfloat16), inputs

    block = rehearsed(half, master_weights=True).training.units[1]
    assert block.weight_bytes == 2 * BLOCK_WEIGHTS
    assert block.state_bytes == 12 * BLOCK_WEIGHTS + 6 * 4
    assert not block.step_reads_weights
    with pytest.raises(ValueError, match="expected trained parameters in bfloat16 or float16, got float32"):
        rehearsed(words, master_weights=True)


def test_a_step_of_the_users_has_its_passes_its_clipping_and_its_masters() -> None:
    class Program:
        def __init__(self, batch: int) -> None:
            self.model, self.inputs = words(batch)
            self.model.to(torch.bfloat16)
            self.masters = [one.detach().float() for one in self.model.parameters()]
            self.optimizer = torch.optim.AdamW(self.masters)

        def step(self) -> None:
            for _ in range(3):
                self.model(self.inputs).float().square().sum().backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            for master, weight in zip(self.masters, self.model.parameters(), strict=True):
                assert weight.grad is not None
                master.grad = weight.grad.float()
            self.optimizer.step()
            self.model.zero_grad()

    training = rehearsed(Program, optimizer=None).training
    assert training.micro_batches == 3
    assert training.clips
    assert training.units[1].state_bytes == 12 * BLOCK_WEIGHTS + 6 * 4


def test_an_optimizer_is_named_once() -> None:
    def own(batch: int) -> Any:
        model, inputs = words(batch)
        return model, inputs, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    training = rehearsed(own, optimizer=None).training
    assert training.units[1].state_bytes == 4 * BLOCK_WEIGHTS
    peak = max(cycle_of(training, all_alike(training, UnitPlacement())).needed_bytes)
    assert peak > training.fixed_bytes + sum(unit.state_bytes for unit in training.units)
    with pytest.raises(ValueError, match="the function returns one"):
        rehearsed(own)
    with pytest.raises(ValueError, match="the function returns none"):
        rehearsed(words, optimizer=None)


def test_experts_of_a_block_are_no_blocks() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(Block() for _ in range(3))

    model = nn.Module()
    model.layers = nn.ModuleList(Experts() for _ in range(2))
    model.stages = nn.Sequential(nn.Sequential(Block(), Block()), nn.Sequential(Block(), Block()))
    assert [one.name for one in blocks_of(model)] == [
        "layers.0",
        "layers.1",
        "stages.0.0",
        "stages.0.1",
        "stages.1.0",
        "stages.1.1",
    ]
