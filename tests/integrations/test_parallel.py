"""Two processes over gloo: the parameters after twenty steps are those of the same loop without vdnn, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.integrations import parallel_training, sequence_training
from tests.integrations.ranks import RankFailed, Ranks

pytestmark = pytest.mark.slow

MOVES, PLANS = "moves", "prefix-cut"
EITHER = pytest.mark.parametrize("how", [MOVES, PLANS])


def check(ranks: Ranks, how: str, job: Callable[..., Any], *arguments: Any) -> list[dict[str, Any]]:
    facts: list[dict[str, Any]] = ranks.run(job, how, *arguments)
    for fact in facts:
        assert fact["differing"] == []
        assert fact["storages"], fact["report"]
        assert fact["steps"] == parallel_training.STEPS
        if how != MOVES:
            assert fact["planned_bytes"], fact["report"]
    return facts


@EITHER
def test_ddp_trains_the_same(two_ranks: Ranks, how: str) -> None:
    first, second = check(two_ranks, how, parallel_training.ddp)
    assert first["digest"] == second["digest"]


def test_ddp_with_accumulation_and_clipping_trains_the_same(two_ranks: Ranks) -> None:
    first, second = check(two_ranks, MOVES, parallel_training.ddp_accumulating)
    assert first["digest"] == second["digest"]


@pytest.mark.drawn(of=2)
@pytest.mark.parametrize(
    ("how", "kind"),
    [(MOVES, "plain"), (PLANS, "plain"), (MOVES, "no reshard"), (MOVES, "cpu offload"), (MOVES, "mixed precision")],
)
def test_fsdp2_trains_the_same(two_ranks: Ranks, how: str, kind: str) -> None:
    first, second = check(two_ranks, how, parallel_training.fsdp2, kind)
    assert first["digest"] == second["digest"]


@EITHER
def test_fsdp1_trains_the_same(two_ranks: Ranks, how: str) -> None:
    check(two_ranks, how, parallel_training.fsdp1)


def test_no_parameter_of_fsdp_leaves(two_ranks: Ranks) -> None:
    """FSDP changes no offloaded byte: gathered parameters, which FSDP resizes itself, are kept."""
    plain = check(two_ranks, MOVES, parallel_training.ddp)
    sharded = check(two_ranks, MOVES, parallel_training.fsdp2, "plain")
    flat = check(two_ranks, MOVES, parallel_training.fsdp1)
    for rank in range(2):
        assert sharded[rank]["storage_bytes"] == plain[rank]["storage_bytes"]
        assert flat[rank]["storage_bytes"] == plain[rank]["storage_bytes"]


@pytest.mark.drawn(of=2)
@EITHER
def test_tensor_parallel_trains_the_same(two_ranks: Ranks, how: str) -> None:
    """DTensors are offloaded too, to the byte. Only the weights of the two linear layers, and the parameters that the
    norm saves, are kept."""
    first, second = check(two_ranks, how, parallel_training.tensor_parallel)
    assert first["digest"] == second["digest"]
    steps, of_blocks = parallel_training.STEPS, len(parallel_training.blocks())
    if how == MOVES:
        rows, width = parallel_training.BATCH, parallel_training.WIDTH
        # Inputs and outputs of the norm and of GELU (for GELU, half of 2 widths each), and two statistics of each row.
        block = rows * (4 * width + 2)
        loss = rows * width
        assert first["storage_bytes"] == 4 * steps * (of_blocks * block + loss)
        assert first["kept"] == {"PARAMETER": steps * of_blocks * 4}


@pytest.mark.drawn(of=2)
@EITHER
def test_sequence_parallel_trains_the_same(two_ranks: Ranks, how: str) -> None:
    first, second = check(two_ranks, how, sequence_training.sequence_parallel)
    assert first["digest"] == second["digest"]
    assert "SUBCLASS" not in first["kept"]


@pytest.mark.drawn(of=2)
@EITHER
def test_context_parallel_by_gathered_keys_trains_the_same(two_ranks: Ranks, how: str) -> None:
    first, second = check(two_ranks, how, sequence_training.gathering_context_parallel)
    assert first["digest"] == second["digest"]


def test_context_parallel_of_torch_has_no_kernel_for_the_cpu(two_ranks: Ranks) -> None:
    """Runs torch without vdnn. Once torch has such a kernel, this test fails and a real test can replace it."""
    for said in two_ranks.run(sequence_training.context_parallel_of_torch):
        assert "_for_cpu.default does not have a sharding strategy" in said


@pytest.mark.drawn(of=2)
@pytest.mark.parametrize(("how", "kind"), [(MOVES, "1F1B"), (PLANS, "1F1B"), ("auto", "1F1B"), (MOVES, "GPipe")])
def test_a_pipeline_trains_the_same(two_ranks: Ranks, how: str, kind: str) -> None:
    check(two_ranks, how, parallel_training.pipeline, kind)


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


@pytest.mark.parametrize("what", [pytest.param("forward", marks=pytest.mark.slow), "backward"])
def test_no_rank_hangs_when_one_raises(what: str) -> None:
    ranks = Ranks(2)
    with pytest.raises(RankFailed) as failure:
        ranks.run(parallel_training.one_raises, what)
    said = failure.value.said
    assert "Trouble: this rank has had enough" in said[1]
    assert "no answer" not in said[0]
    assert not any(process.is_alive() for process in ranks.processes)
    assert [process.exitcode for process in ranks.processes] == [1, 1]
