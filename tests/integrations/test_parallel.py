"""Two processes over gloo: what a training comes to after twenty steps is that of the same program without vdnn, bit
for bit, whatever leaves the device."""

from __future__ import annotations

import pytest

from tests.integrations import parallel_training
from tests.integrations.parallel_training import (
    AUTO,
    BATCH,
    MOVES,
    PLANS,
    SOME_STAY,
    STATES,
    STEPS,
    WIDTH,
    beside_plain,
)
from tests.integrations.ranks import RankFailed, Ranks

pytestmark = pytest.mark.slow

KINDS_OF_DDP = [
    *("DDP, static graph", "DDP, checkpoints", "DDP, reentrant", "DDP, small buckets", "DDP, fp16"),
    *("DDP, bucket view", "DDP, unused"),
]
SHARDED = ["FSDP2", "FSDP2, micro-batches", "FSDP2, no reshard", "FSDP2, mixed precision"]
CASES = [
    *((one, how) for one in ("DDP", "FSDP2", "FSDP1", "tensor parallel", "1F1B") for how in (MOVES, PLANS)),
    *((one, how) for one in ("sequence parallel", "context parallel") for how in (MOVES, PLANS)),
    *(("DDP, PowerSGD", how) for how in (MOVES, PLANS, "state", "gradients")),
    *((one, MOVES) for one in ("DDP, no_sync", "FSDP2, no reshard", "FSDP2, cpu offload", "FSDP2, mixed precision")),
    *(("1F1B", AUTO), ("GPipe", MOVES), ("interleaved 1F1B", MOVES), ("DDP, ZeRO 1", MOVES)),
    *((one, "state") for one in ("DDP", "DDP, micro-batches", *SHARDED, "FSDP2, saved and loaded", "1F1B")),
    *((one, "gradients") for one in ("DDP", *KINDS_OF_DDP, *SHARDED, "1F1B")),
    *((one, "frozen") for one in ("DDP, frozen", "FSDP2, frozen")),
    ("1F1B", "all"),
    *((one, SOME_STAY) for one in ("DDP", "DDP, micro-batches", "DDP, checkpoints", *SHARDED[:2], "1F1B")),
]


@pytest.mark.drawn(of=2)
@pytest.mark.parametrize(("program", "way"), CASES)
def test_ranks_train_the_same(program: str, way: str, two_ranks: Ranks) -> None:
    """Published: deepspeedai/DeepSpeed#7967 and #7981, meta-llama/llama-cookbook#360, pytorch/pytorch#73784,
    verl-project/verl#93 and instructlab/training#414 dropped gradients of micro-batches, or replaced their sum;
    axolotl-ai-cloud/axolotl#3058: clipping raised with shards on the host."""
    facts = two_ranks.run(beside_plain, program, way)
    for fact in facts:
        assert fact["differing"] == []
        assert fact["storages"], fact["report"]
        assert fact.get("some_stayed", 1) > 0
        if way in (PLANS, AUTO):
            assert fact["planned_bytes"], fact["report"]
        if way in (MOVES, PLANS) and program != "DDP, no_sync":
            assert fact["steps"] == STEPS
        if way in STATES and program != "FSDP2, frozen":
            assert fact["host_bytes"] == fact["state_bytes"] > 0
        if way == "gradients":
            assert (fact["most_gradient_bytes"] == 0) == ("bucket view" in program)  # DDP's buckets are the gradients
            # All parameters are in checkpoints whose backward is nested: DDP has not reduced at the end of those.
            assert (fact["stayed"] > 0) == ("bucket view" in program or "reentrant" in program)
    if program not in ("1F1B", "GPipe", "interleaved 1F1B"):
        assert facts[0]["digest"] == facts[1]["digest"], "the ranks have other parameters"


def test_what_of_a_training_leaves_is_reported(two_ranks: Ranks) -> None:
    for fact in two_ranks.run(beside_plain, "1F1B", "all"):
        for line in ("  parameters: ", "gradients of AdamW: ", "optimizer state of AdamW: "):
            assert line in fact["report"]
    for fact in two_ranks.run(beside_plain, "DDP, frozen", "frozen"):
        assert "gradients of AdamW: " in fact["report"]
        assert "  frozen parameters: 4.31 KiB on the host" in fact["report"]
    for fact in two_ranks.run(beside_plain, "FSDP2, frozen", "frozen"):
        assert "gradients of AdamW: " in fact["report"]
        assert "stays on the device: it is a DTensor" in fact["report"]


def test_no_parameter_of_fsdp_leaves(two_ranks: Ranks) -> None:
    """FSDP changes no offloaded byte: gathered parameters, which FSDP resizes itself, are kept."""
    plain, *others = (two_ranks.run(beside_plain, one, MOVES) for one in ("DDP", "FSDP2", "FSDP1"))
    for one in others:
        assert [fact["storage_bytes"] for fact in one] == [fact["storage_bytes"] for fact in plain]


def test_of_a_dtensor_the_local_part_leaves_to_the_byte(two_ranks: Ranks) -> None:
    """Only the weights of the two linear layers, and the parameters that the norm saves, are kept."""
    first, _ = two_ranks.run(beside_plain, "tensor parallel", MOVES)
    of_blocks = len(parallel_training.blocks())
    # Inputs and outputs of the norm and of GELU (for GELU, half of 2 widths each), and two statistics of each row.
    block = BATCH * (4 * WIDTH + 2)
    loss = BATCH * WIDTH
    assert first["storage_bytes"] == 4 * STEPS * (of_blocks * block + loss)
    assert first["kept"] == {"PARAMETER": STEPS * of_blocks * 4}
    first, _ = two_ranks.run(beside_plain, "sequence parallel", MOVES)
    assert "SUBCLASS" not in first["kept"]


def test_context_parallel_of_torch_has_no_kernel_for_the_cpu(two_ranks: Ranks) -> None:
    """Runs torch without vdnn. Once torch has such a kernel, this test fails and a real test can replace it."""
    for said in two_ranks.run(parallel_training.context_parallel_of_torch):
        assert "_for_cpu.default does not have a sharding strategy" in said


def test_a_stage_under_1f1b_is_planned_by_the_search_and_runs_as_predicted(two_ranks: Ranks) -> None:
    """Regression test: releases at a use follow the use's own reload, and plans of the search once exceeded the
    budget."""
    found = two_ranks.run(parallel_training.pipeline_as_planned)
    for plan, predicted, measured in found:
        assert plan.policy == "auto"
        assert plan.offloaded_bytes
        # In the last stage each micro-batch is a step. The last one ends after the optimizer's step, others before it.
        assert measured.marks[-2].end_ns == predicted.marks[-2].end_ns
        assert measured.peak_bytes == predicted.peak_bytes == plan.budget_bytes
    first = found[0]
    assert first[2].step_ns == first[1].step_ns


def test_ranks_that_agree_on_a_plan_take_the_state_over(two_ranks: Ranks) -> None:
    for fact in two_ranks.run(parallel_training.ddp_under_a_budget):
        assert fact["differing"] == []
        assert fact["host_bytes"] == fact["state_bytes"] > 0
        assert fact["is_planned"]


@pytest.mark.parametrize("kind", ["cpu offload", "another device"])
def test_state_that_fsdp2_keeps_on_the_host_itself_is_refused(kind: str, two_ranks: Ranks) -> None:
    for said in two_ranks.run(parallel_training.refused, kind):
        assert said.startswith("optimizer= does not work with FSDP2's CPUOffloadPolicy: both keep")


def test_trained_parameters_are_refused_under_ddp_and_fsdp2_before_anything_is_lost(two_ranks: Ranks) -> None:
    for before, sharded, inside in two_ranks.run(parallel_training.all_parameters_refused):
        assert "stays on the device: the program holds its memory" in inside
        assert "more parameters stay on the device" in inside
        assert before.startswith("parameters='all' does not work with DistributedDataParallel: torch replaces")
        assert sharded.startswith("parameters='all' does not work with FSDP2 or another DTensor: it gathers")


def test_a_shard_whose_memory_the_program_holds_stays_what_it_sees(two_ranks: Ranks) -> None:
    assert two_ranks.run(parallel_training.a_held_shard) == [[True, True]] * 2


@pytest.mark.parametrize(
    ("where", "way", "model"),
    [
        ("forward", MOVES, "DDP"),
        ("backward", MOVES, "DDP"),
        ("step", "state", "DDP"),
        ("backward", "gradients", "FSDP2"),
        pytest.param("backward", "gradients", "DDP", marks=pytest.mark.full),
    ],
)
def test_no_rank_hangs_when_one_raises(where: str, way: str, model: str) -> None:
    ranks = Ranks(2)
    with pytest.raises(RankFailed) as failure:
        ranks.run(parallel_training.one_raises, where, way, model)
    said = failure.value.said
    assert "this rank has had enough" in said[1]
    assert "the step of AdamW stopped after" in said[1] or where != "step"
    assert "no answer" not in said[0]
    assert not any(process.is_alive() for process in ranks.processes)
    assert [process.exitcode for process in ranks.processes] == [1, 1]
