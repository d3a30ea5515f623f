"""Ranks agree on one plan between steps, or stop together; and they share the memory of their host."""

from __future__ import annotations

import pytest

import vdnn
from tests.integrations import agreeing
from tests.integrations.ranks import RankFailed, Ranks
from vdnn import _C
from vdnn.errors import VdnnError
from vdnn.integrations.ranks import Proposal, choose, offload_together
from vdnn.runtime.session.host_share import host_bytes_of_rank
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
