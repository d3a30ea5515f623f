"""Gradients that are on the host between backward and the step, over two processes: parameters, state and what the
program reads of gradients and norms are those of the same loop without vdnn, bit for bit, after twenty steps."""

from __future__ import annotations

import pytest

from tests.integrations import reduced_training
from tests.integrations.ranks import RankFailed, Ranks

pytestmark = pytest.mark.slow
KINDS = [False, pytest.param(True, marks=pytest.mark.full)]


@pytest.mark.parametrize("is_more", KINDS)
def test_gradients_that_ddp_reduces_leave_behind_it(two_ranks: Ranks, is_more: bool) -> None:
    """deepspeedai/DeepSpeed#7967 and #7981, over several ranks: gradients of micro-batches that are not reduced were
    dropped."""
    for facts in two_ranks.run(reduced_training.ddp, is_more):
        for kind, fact in facts.items():
            assert fact["differing"] == [], kind
            assert (fact["most_bytes"] == 0) == (kind == "bucket view"), kind  # DDP's buckets are the gradients
            # All parameters are in checkpoints whose backward is nested: DDP has not reduced at the end of those.
            assert (fact["stayed"] > 0) == (kind in ("bucket view", "reentrant")), kind


@pytest.mark.parametrize("is_more", KINDS)
def test_gradients_of_shards_leave_behind_fsdp2s_reduction(two_ranks: Ranks, is_more: bool) -> None:
    """axolotl-ai-cloud/axolotl#3058: clipping raised with shards on the host. instructlab/training#414: a reduced
    gradient replaced the sum of earlier micro-batches."""
    for facts in two_ranks.run(reduced_training.fsdp2, is_more):
        for kind, fact in facts.items():
            assert fact["differing"] == [], kind
            assert fact["most_bytes"] > 0, kind
            assert fact["stayed"] == 0, kind


def test_a_shard_whose_memory_the_program_holds_stays_what_it_sees(two_ranks: Ranks) -> None:
    assert two_ranks.run(reduced_training.a_held_shard) == [[True, True]] * 2


def test_a_stage_of_a_pipeline_has_all_of_its_training_state_on_the_host(two_ranks: Ranks) -> None:
    for fact in two_ranks.run(reduced_training.pipeline):
        assert fact["differing"] == []
        assert "  parameters: " in fact["report"]
        assert "gradients of AdamW: " in fact["report"]
        assert "optimizer state of AdamW: " in fact["report"]


def test_frozen_parameters_leave_under_ddp_beside_gradients_and_state(two_ranks: Ranks) -> None:
    for facts in two_ranks.run(reduced_training.frozen):
        for kind, fact in facts.items():
            assert fact["differing"] == [], kind
            assert "gradients of AdamW: " in fact["report"], kind
        assert "  frozen parameters: 4.31 KiB on the host" in facts["DDP"]["report"]
        assert "stays on the device: it is a DTensor" in facts["FSDP2"]["report"]


def test_trained_parameters_are_refused_under_ddp_and_fsdp2_before_anything_is_lost(two_ranks: Ranks) -> None:
    for said in two_ranks.run(reduced_training.all_parameters_refused):
        before, sharded, inside = said
        assert "stays on the device: the program holds its memory" in inside
        assert "more parameters stay on the device" in inside
        assert before.startswith("parameters='all' does not work with DistributedDataParallel: torch replaces")
        assert sharded.startswith("parameters='all' does not work with FSDP2 or another DTensor: it gathers")


@pytest.mark.parametrize("what", ["FSDP2", pytest.param("DDP", marks=pytest.mark.full)])
def test_no_rank_hangs_when_one_raises_with_gradients_away(what: str) -> None:
    ranks = Ranks(2)
    with pytest.raises(RankFailed) as failure:
        ranks.run(reduced_training.one_raises_with_its_gradients_away, what)
    said = failure.value.said
    assert "this rank has had enough" in said[1]
    assert "no answer" not in said[0]
    assert not any(process.is_alive() for process in ranks.processes)
