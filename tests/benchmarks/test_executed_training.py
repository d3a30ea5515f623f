"""The benchmark that executes a whole training of Llama's shapes, with one layer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.whole_state import executed


@pytest.mark.filterwarnings("ignore::vdnn.VdnnWarning")
def test_a_layer_trains_under_a_budget_beside_everything_kept() -> None:
    pytest.importorskip("transformers")
    training = replace(executed.TRAININGS[0], model=replace(executed.LLAMA_8B, budget="12GiB"))
    kept, steps = executed.kept(1, training), executed.ran(1, training, 3)
    assert kept.peak_bytes > 12 << 30 >= steps[-1].peak_bytes
    assert steps[-1].step_ns >= kept.step_ns
    assert steps[-1].host_bytes > 0


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_adapters_of_two_layers_train_under_a_budget_and_a_host_that_is_full() -> None:
    """Frozen weights take 7.1 GiB of the host."""
    pytest.importorskip("transformers"), pytest.importorskip("peft")
    training = replace(executed.TRAININGS[-1], model=replace(executed.LLAMA_70B, budget="8GiB"), host="10GiB")
    kept, steps = executed.kept(2, training), executed.ran(2, training, 3)
    assert kept.peak_bytes > 8 << 30 >= max(one.peak_bytes for one in steps)
    assert steps[-1].host_bytes <= 10 << 30


def test_the_optimizer_steps_as_torchs_in_float32() -> None:
    torch.manual_seed(0)
    ours, torchs = torch.randn(8, 8), torch.randn(8, 8)
    torchs.copy_(ours)
    ours.requires_grad_(), torchs.requires_grad_()
    first = executed.MasterAdamW([ours], lr=1e-2)
    second = torch.optim.AdamW([torchs], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    for _ in range(5):
        for parameter, optimizer in ((ours, first), (torchs, second)):
            parameter.square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(ours, torchs)
