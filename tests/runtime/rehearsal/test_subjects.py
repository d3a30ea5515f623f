"""vdnn.plan takes models as people bring them, and plans the same step for each way to make it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import vdnn
from tests.runtime.rehearsal import programs
from tests.runtime.rehearsal.programs import WIDTH
from vdnn.errors import VdnnError
from vdnn.hardware import load_profile
from vdnn.runtime.rehearsal.rehearsal import Rehearsal, rehearse, subject_of

BATCH = 4096
WEIGHTS = 2 * (WIDTH * WIDTH + WIDTH)


def rehearsed(make: Any, batch: Any = BATCH, **options: Any) -> Rehearsal:
    return rehearse(subject_of(make, batch), load_profile("h100"), **options)


@pytest.mark.parametrize("make", programs.SAME_AS_PLAIN, ids=lambda make: make.__name__)
def test_every_way_to_make_a_model_is_the_same_step(make: Callable[[int], Any]) -> None:
    plain, found = rehearsed(programs.plain), rehearsed(make)
    assert found.parameter_bytes == found.gradient_bytes == plain.parameter_bytes == WEIGHTS * 4
    assert found.recording.managed_bytes == plain.recording.managed_bytes
    assert found.recording.resident_bytes == plain.recording.resident_bytes
    assert found.recording.compute_ns == plain.recording.compute_ns


def test_a_module_and_a_batch_are_the_same_step_and_stay_as_they_are() -> None:
    model, rows = programs.MADE_BEFORE, programs.MADE_BEFORE_INPUTS
    before = [one.clone() for one in model.parameters()]
    assert rehearsed(model, rows).recording.managed_bytes == rehearsed(programs.plain).recording.managed_bytes
    assert rehearsed(programs.META_BEFORE, rows.to("meta")).parameter_bytes == WEIGHTS * 4
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
    assert all(one.device.type == "meta" for one in programs.META_BEFORE.parameters())


@pytest.mark.parametrize("make", [programs.halved, programs.converted, programs.converted_on_the_gpu])
def test_a_converted_model_is_planned_in_its_dtype(make: Callable[[int], Any]) -> None:
    found = rehearsed(make)
    assert found.parameter_bytes == WEIGHTS * 2
    # The inputs, and two outputs of Tanh. The loss is computed in float32.
    assert found.recording.managed_bytes == BATCH * WIDTH * (3 * 2 + 4)


def test_tied_parameters_stay_tied_when_they_are_converted() -> None:
    def tied(batch: int) -> Any:
        model = programs.net()
        model[2].weight = model[0].weight
        first = model[0].weight
        model.to(torch.bfloat16).float().half()
        assert model[2].weight is model[0].weight is first
        return model, torch.randn(batch, WIDTH).half()

    def tied_on_meta(batch: int) -> Any:
        with torch.device("meta"):
            model = programs.net()
        model[2].weight = model[0].weight
        return model, torch.randn(batch, WIDTH)

    assert rehearsed(tied).parameter_bytes == (WIDTH * WIDTH + 2 * WIDTH) * 2
    assert rehearsed(tied_on_meta).parameter_bytes == (WIDTH * WIDTH + 2 * WIDTH) * 4


def test_module_conversion_is_torchs_own_again_afterwards() -> None:
    before = nn.Module._apply
    rehearsed(programs.converted)
    assert nn.Module._apply is before
    assert nn.Linear(2, 2).half().weight.dtype is torch.float16


@pytest.mark.parametrize("make", [programs.with_optimizer, programs.with_optimizer_and_loss])
def test_a_returned_optimizer_is_part_of_the_step(make: Callable[[int], Any]) -> None:
    found, named = rehearsed(make), rehearsed(programs.plain, optimizer="adamw")
    assert found.optimizer_bytes == named.optimizer_bytes >= 2 * WEIGHTS * 4
    assert found.recording.resident_bytes == named.recording.resident_bytes
    with pytest.raises(ValueError, match="expected none, because the function returns one"):
        rehearsed(make, optimizer="sgd")


def test_a_whole_training_step_runs_with_its_scaler_average_and_log() -> None:
    made: list[programs.WholeStep] = []

    def make(batch: int) -> programs.WholeStep:
        made.append(programs.WholeStep(batch))
        return made[-1]

    report = vdnn.plan(make, BATCH, hardware="a100-80", budget="min")
    assert report.executed is not None
    assert report.executed.step_ns == report.planned.timeline.step_ns
    assert report.memory.optimizer >= 2 * report.memory.parameters
    assert report.memory.gradients == report.memory.parameters
    for loss, norm, right, scale, output in made[0].log:
        assert (loss, norm, right, scale) == (1.0, 1.0, 0.1, 65536.0), "finite, and as often right as by chance"
        assert output.shape == (BATCH, 10)
    assert all("programs.py:" in one for one in report.stand_ins)
    assert report.stand_ins[0] in str(report)
    assert report.as_json()["stand_ins"] == list(report.stand_ins)


def test_a_whole_step_made_before_is_copied() -> None:
    program = programs.MadeBefore()
    weights = [one.clone() for one in program.model.parameters()]
    found, named = rehearsed(lambda batch: program), rehearsed(programs.plain, optimizer="adamw")
    assert found.parameter_bytes == WEIGHTS * 4
    assert found.optimizer_bytes == named.optimizer_bytes
    assert found.recording.resident_bytes == named.recording.resident_bytes
    assert all(torch.equal(one, other) for one, other in zip(weights, program.model.parameters(), strict=True))
    assert not program.optimizer.state


def test_autocast_of_the_gpu_is_not_off() -> None:
    def half(batch: int) -> Any:
        class Half:
            model, rows = programs.net(), torch.randn(batch, WIDTH)

            def step(self) -> None:
                with torch.autocast("cuda", torch.bfloat16):
                    loss = self.model(self.rows).square().mean()
                loss.backward()

        return Half()

    keys = [point.key for point in rehearsed(half).recording.points if point.key is not None]
    assert {one.dtype for one in keys if one.producer == "TanhBackward0"} == {"bfloat16"}


def test_a_checkpointed_block_is_computed_again_as_it_was() -> None:
    """Function modes are not active inside of backward() by themselves: attention with dropout saved other tensors."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(64, 3 * 64)

        def _attend(self, rows: torch.Tensor) -> torch.Tensor:
            query, key, value = self.project(rows).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
            return nn.functional.scaled_dot_product_attention(query, key, value, dropout_p=0.1)

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return torch.utils.checkpoint.checkpoint(self._attend, rows, use_reentrant=False)

    found = rehearsed(lambda batch: (Block(), torch.randn(batch, 256, 64)), 64)
    assert max(one.nbytes for one in found.recording.lifetimes) < 64 * 4 * 256 * 256 * 4


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_an_adapter_trains_the_frozen_model_under_it() -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")

    def make(batch: int) -> Any:
        config = transformers.GPT2Config(
            n_layer=1, n_embd=128, n_head=2, vocab_size=512, bos_token_id=1, eos_token_id=2
        )
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        tokens = torch.randint(512, (batch, 128))
        adapter = peft.LoraConfig(task_type="CAUSAL_LM", fan_in_fan_out=True)
        return peft.get_peft_model(model, adapter), {"input_ids": tokens, "labels": tokens}

    found = rehearsed(make, 64, optimizer="adamw")
    assert 0 < found.gradient_bytes < found.parameter_bytes / 10


def test_a_small_step_says_what_to_do_and_nothing_else(recwarn: pytest.WarningsRecorder) -> None:
    with pytest.raises(VdnnError, match="Pass a smaller min_bytes"):
        rehearsed(programs.plain, 2)
    assert not recwarn


def test_a_step_without_a_backward_pass_is_refused() -> None:
    class Forward:
        def __init__(self, batch: int) -> None:
            self.model, self.rows = programs.net(), torch.randn(batch, WIDTH)

        def step(self) -> None:
            self.model(self.rows).sum()

    with pytest.raises(VdnnError, match="runs no backward pass"):
        rehearsed(Forward)


def test_a_lazy_module_is_refused_with_what_to_do() -> None:
    with pytest.raises(VdnnError, match="lazy module: give the module its sizes"):
        rehearsed(lambda batch: (nn.Sequential(nn.LazyLinear(8)), torch.randn(batch, WIDTH)))
