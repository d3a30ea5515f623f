"""Ranks agree on one plan between steps, or stop together; and they share the memory of their host."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

import vdnn
from tests.integrations import agreeing
from tests.integrations.ranks import RankFailed, Ranks
from vdnn import _C
from vdnn.errors import VdnnError
from vdnn.integrations.ranks import Proposal, choose, offload_together
from vdnn.runtime.session.limits import host_bytes_of_rank
from vdnn.step.plan import Plan

pytestmark = pytest.mark.slow


def test_ranks_with_one_step_follow_one_plan(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(agreeing.agree, "min")
    assert first["plan"] == second["plan"]
    for facts in (first, second):
        assert facts["differing"] == []
        assert facts["difference"] is None
        assert facts["offloaded_bytes"]
        assert facts["moved"]


@pytest.mark.parametrize("kind", agreeing.MODELS)
def test_ranks_follow_the_plans_of_an_earlier_run_from_their_first_step(
    kind: str, two_ranks: Ranks, tmp_path: Path
) -> None:
    folder = str(tmp_path)
    first = two_ranks.run(agreeing.run_with_a_folder, folder, kind)
    again = two_ranks.run(agreeing.run_with_a_folder, folder, kind)
    assert len(list(tmp_path.glob("2-ranks/*.plans"))) == 2, "each rank has a file"
    for facts, before in zip(again, first, strict=True):
        assert (before["recorded"], before["plans_made"], before["planned_before"]) == (2, 1, False)
        assert (facts["recorded"], facts["plans_made"], facts["planned_before"]) == (0, 0, True)
        assert facts["plan"] == before["plan"]
        assert facts["follows_stored"]
        assert facts["differing"] == before["differing"] == []
        assert facts["difference"] is None
        assert facts["moved"]
        assert facts["lines"][0].startswith("follows the stored plan of an earlier run: ")
        assert before["peaks"][0] > before["budget_bytes"], "a first step without a plan exceeds the least budget"
        assert facts["budget_bytes"] == before["budget_bytes"]
        assert statistics.median(facts["peaks"]) <= facts["budget_bytes"]
        assert max(facts["peaks"]) <= facts["budget_bytes"] + facts["gathered_bytes"], "the first step is within it"


def test_if_one_rank_has_no_stored_plan_all_record_a_step(two_ranks: Ranks, tmp_path: Path) -> None:
    folder = str(tmp_path)
    two_ranks.run(agreeing.run_with_a_folder, folder, "DDP")
    damaged = min(tmp_path.glob("2-ranks/*.plans"))
    damaged.write_bytes(damaged.read_bytes()[:-50])
    for facts in two_ranks.run(agreeing.run_with_a_folder, folder, "DDP"):
        assert (facts["recorded"], facts["plans_made"], facts["follows_stored"]) == (2, 1, False)
        assert "it was changed or cut off after it was written" in facts["lines"][0]
        assert facts["lines"][0].endswith("All ranks record a step")
        assert facts["differing"] == []
    assert all(facts["follows_stored"] for facts in two_ranks.run(agreeing.run_with_a_folder, folder, "DDP"))


def test_ranks_whose_first_step_is_not_as_stored_record_a_step_and_store_it(two_ranks: Ranks, tmp_path: Path) -> None:
    folder = str(tmp_path)
    two_ranks.run(agreeing.run_with_a_folder, folder, "DDP", 64)
    for facts in two_ranks.run(agreeing.run_with_a_folder, folder, "DDP", 128):
        assert (facts["planned_before"], facts["follows_stored"]) == (True, False)
        assert (facts["recorded"], facts["plans_made"]) == (2, 1)
        assert "the first step of rank 0 was not as its stored plan: " in facts["lines"][1]
        assert facts["differing"] == []
    for facts in two_ranks.run(agreeing.run_with_a_folder, folder, "DDP", 128):
        assert facts["follows_stored"]
        assert facts["difference"] is None


def test_a_recheck_that_fails_removes_the_stored_plans_of_the_ranks(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(agreeing.run_with_a_folder, str(tmp_path), "DDP")
    assert two_ranks.run(agreeing.a_recompute_is_wrong, str(tmp_path)) == [(True, False)] * 2


@pytest.mark.parametrize("kind", agreeing.MODELS)
def test_ranks_that_plan_by_themselves_record_nothing_in_a_second_run(
    kind: str, two_ranks: Ranks, tmp_path: Path
) -> None:
    for facts in two_ranks.run(agreeing.each_by_itself, str(tmp_path), kind):
        assert facts["recorded"] > 0
    for facts in two_ranks.run(agreeing.each_by_itself, str(tmp_path), kind):
        assert facts["recorded"] == 0


def test_a_folder_that_cannot_be_written_costs_ranks_one_warning(tmp_path: Path, two_ranks: Ranks) -> None:
    taken = tmp_path / "taken"
    taken.write_text("a file")
    for facts in two_ranks.run(agreeing.run_with_a_folder, str(taken), "DDP"):
        assert (facts["recorded"], facts["follows_stored"], facts["differing"]) == (2, False, [])
        assert facts["lines"] == [
            "rank 0 follows no stored plan: the plan folder cannot be written. All ranks record a step"
        ]


def test_a_budget_that_one_rank_cannot_meet_stops_all_with_its_words() -> None:
    with pytest.raises(RankFailed) as failure:
        Ranks(2).run(agreeing.one_cannot_meet_its_budget)
    assert sorted(failure.value.said) == [0, 1]
    for said in failure.value.said.values():
        assert "RankError: rank 1 of 2 cannot continue: budget 1.00 KiB cannot be met" in said
        assert "All ranks stop here, between two steps" in said


def test_a_rank_that_never_comes_is_waited_for_no_longer_than_the_limit() -> None:
    with pytest.raises(RankFailed) as failure:
        Ranks(2).run(agreeing.one_does_not_come)
    assert list(failure.value.said) == [0]
    assert "rank 0 of 2 cannot continue: the others did not agree on a plan within 2 s" in failure.value.said[0]


def test_a_rank_that_hangs_is_named_with_its_stack() -> None:
    ranks = Ranks(2)
    ranks.run(agreeing.nothing)
    with pytest.raises(RankFailed) as failure:
        ranks.run(agreeing.one_waits_for_ever, limit_s=1)
    assert list(failure.value.said) == [1]
    assert "no answer after 1 s" in failure.value.said[1]
    assert "in one_waits_for_ever" in failure.value.said[1]


def plan(name: str) -> Plan:
    return Plan(name, "cpu", "", None, (), ())


def test_ranks_whose_steps_differ_follow_plans_of_their_own() -> None:
    """Two stages of a pipeline with two ranks each: each stage follows the plan of its rank with the highest peak."""
    first, second, third, fourth = (plan(str(rank)) for rank in range(4))
    proposals = [
        Proposal("one stage", 10, first),
        Proposal("another", 30, second),
        Proposal("one stage", 20, third),
        Proposal("another", 30, fourth),
    ]
    assert [choose(proposals, rank) for rank in range(4)] == [third, second, third, second]


def test_a_process_that_is_alone_is_told_to_use_offload() -> None:
    with pytest.raises(VdnnError, match=r"torch.distributed is not initialised. .* use vdnn.offload"):
        offload_together("min")
    with pytest.raises(ValueError, match=r"plans: the model tells whose plans are stored\. Give model= as well\."):
        offload_together("min", plans="folder")


@pytest.mark.parametrize("ranks", [2, 8])
def test_ranks_of_a_node_share_what_one_may_pin(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_C, "default_pinned_cap_bytes", lambda limits: 800)
    assert host_bytes_of_rank({"LOCAL_WORLD_SIZE": str(ranks)}) == 800 // ranks
    assert host_bytes_of_rank({"LOCAL_WORLD_SIZE": "1"}) == host_bytes_of_rank({}) == 0


def test_a_session_is_opened_with_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(_C, "default_pinned_cap_bytes", lambda limits: 4 << 20)
    assert vdnn.offload(device="sim")._options.transport.host_budget_bytes == 1 << 20
    given = vdnn.offload(device="sim", limits=vdnn.Limits(host_budget="3MiB"))
    assert given._options.transport.host_budget_bytes == 3 << 20


@pytest.mark.parametrize("said", ["none", "0", "-1", ""])
def test_a_count_of_ranks_that_is_none_is_refused(said: str) -> None:
    with pytest.raises(ValueError, match="LOCAL_WORLD_SIZE: expected the number of processes on this node"):
        host_bytes_of_rank({"LOCAL_WORLD_SIZE": said})
