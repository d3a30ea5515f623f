"""An optimizer whose state is on the host, over two processes: parameters and state after twenty steps are those of the
same loop without vdnn, bit for bit, and all of the state but counts of steps is on the host."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integrations import managed_training
from tests.integrations.ranks import RankFailed, Ranks

pytestmark = pytest.mark.slow


def check(ranks: Ranks, job: Callable[..., Any], *arguments: Any) -> list[dict[str, Any]]:
    facts: list[dict[str, Any]] = ranks.run(job, *arguments)
    for fact in facts:
        assert fact["differing"] == []
        assert fact["host_bytes"] == fact["state_bytes"] > 0
    return facts


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_ddp_trains_the_same(two_ranks: Ranks, micro_batches: int) -> None:
    first, second = check(two_ranks, managed_training.ddp, micro_batches)
    assert first["digest"] == second["digest"]


@pytest.mark.parametrize("kind", ["plain", "no reshard", "mixed precision"])
def test_fsdp2_trains_the_same_and_its_shards_of_the_state_leave(two_ranks: Ranks, kind: str) -> None:
    check(two_ranks, managed_training.fsdp2, kind)


def test_fsdp2_accumulates_every_micro_batch_llama_cookbook_360(two_ranks: Ranks) -> None:
    """FSDP's own CPU offload replaced the accumulated gradient by that of the last micro-batch, and the loss did not
    converge. pytorch/pytorch#73784 and verl-project/verl#93 are the same symptom."""
    check(two_ranks, managed_training.fsdp2, "plain", 4)


def test_a_distributed_checkpoint_of_fsdp2_is_saved_and_loaded_inside(two_ranks: Ranks, tmp_path: Path) -> None:
    check(two_ranks, managed_training.fsdp2_saved_and_loaded, str(tmp_path))


def test_fsdp2_with_its_own_cpu_offload_is_refused(two_ranks: Ranks) -> None:
    for job in (managed_training.fsdp2_with_its_own_offload, managed_training.fsdp2_on_another_device_than_its_mesh):
        for said in two_ranks.run(job):
            assert said.startswith("optimizer= does not work with FSDP2's CPUOffloadPolicy: both keep")


def test_ranks_that_agree_on_a_plan_take_the_state_over(two_ranks: Ranks) -> None:
    assert all(fact["is_planned"] for fact in check(two_ranks, managed_training.ddp_under_a_budget))


def test_a_stage_of_a_pipeline_trains_the_same(two_ranks: Ranks) -> None:
    check(two_ranks, managed_training.pipeline)


def test_no_rank_hangs_when_one_raises_in_its_step() -> None:
    ranks = Ranks(2)
    with pytest.raises(RankFailed) as failure:
        ranks.run(managed_training.one_raises_in_its_step)
    said = failure.value.said
    assert "the step of AdamW stopped after" in said[1]
    assert "no answer" not in said[0]
    assert not any(process.is_alive() for process in ranks.processes)
