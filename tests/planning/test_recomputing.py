"""Recomputes in a plan: the recording of a step with recomputes, and the recomputes that auto chooses."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import assume

from tests.drawn import for_examples, quick_and_full
from tests.planning.recordings import LINKS, RESIDENT, any_recomputable_recording, chain, compressible, recomputable
from tests.planning.reference.exhaustive import count_of_plans, shortest_steps
from vdnn.errors import VdnnError
from vdnn.planning.bound.lower_bound import lower_bound
from vdnn.planning.costs import LinkCosts
from vdnn.planning.footprint import interval_bytes
from vdnn.planning.least_memory import least_bytes
from vdnn.planning.planned_step import plan_step
from vdnn.planning.recomputing import candidates_of, with_recomputes
from vdnn.planning.recorded_step import recorded_step
from vdnn.planning.simulate import simulate
from vdnn.step.plan import Action
from vdnn.step.recording import PointKind, Recording

EVEN = LinkCosts(1e9, 1e9, 2e9, 0)  # one nanosecond for each byte
SLOW = LinkCosts(1e7, 1e7, 2e7, 0)  # and here a hundred


def test_nothing_chosen_is_the_step_itself() -> None:
    recording = chain([10, 20, 30])
    assert with_recomputes(recording, ()) is recording


def test_a_recompute_reads_computes_and_stays() -> None:
    """The second of three storages is recomputed from the first, right before its use."""
    recording = recomputable(chain([10, 20, 30]), 1, (0,), compute_ns=7, extra=5)
    recomputed = with_recomputes(recording, {1})
    used = [(point.kind, point.lifetime) for point in recomputed.points]
    before = [(point.kind, point.lifetime) for point in recording.points]
    assert used == [*before[:4], (PointKind.USE, 0), *before[4:]]
    assert [point.compute_ns for point in recomputed.points[4:6]] == [1000, 7], "what was computed, and the recompute"
    # The second is absent while the third is saved and used. Its recompute needs five bytes of temporary memory.
    assert recomputed.points[3].peak_bytes == RESIDENT + 10 + 30
    assert recomputed.points[4].allocated_bytes == RESIDENT + 10
    assert recomputed.points[5].peak_bytes == RESIDENT + 10 + 20 + 5
    assert recomputed.points[5].allocated_bytes == RESIDENT + 10 + 20
    assert recomputed.lifetimes[0].uses == (4, 6)
    assert recomputed.lifetimes[0].read == (5, 7)


def test_a_codec_leaves_a_part_and_takes_time_twice() -> None:
    """The encoded part is saved right before the point at which the codec is known, and used right before its
    decoding."""
    recording = compressible(recomputable(chain([10, 80, 5, 60]), 1, (), compute_ns=7), 1, discard_ns=3)
    packed = with_recomputes(recording, {1})
    places = [(point.kind, point.lifetime) for point in recording.points]
    used = [*places[:2], (PointKind.SAVE, 4), *places[2:6], (PointKind.USE, 4), *places[6:]]
    assert [(point.kind, point.lifetime) for point in packed.points] == used
    assert [point.compute_ns for point in packed.points] == [1000, 1000, 1003, 0, 1000, 1000, 1000, 1000, 7, 1000, 1000]
    assert packed.points[2].peak_bytes == RESIDENT + 10 + 80 + 5 + 10, "while it is packed both are there"
    assert packed.points[2].allocated_bytes == RESIDENT + 10 + 5 + 10
    assert packed.points[4].peak_bytes == RESIDENT + 10 + 10 + 5 + 60
    assert packed.points[7].allocated_bytes == RESIDENT + 10 + 10
    assert packed.points[8].peak_bytes == RESIDENT + 10 + 10 + 80
    left = packed.lifetimes[4]
    assert (left.nbytes, left.saves, left.copy_point, left.free_point) == (10, (2,), 2, 2)
    assert (left.uses, left.read, left.end_point) == ((7,), (8,), packed.lifetimes[1].end_point)
    planned = plan_step(recording, SLOW, recording.peak_bytes - 20, "auto")
    assert planned.plan.lifetimes[1].action is Action.COMPRESS
    assert planned.timeline.step_ns == recording.compute_ns + 10


def test_what_is_needed_to_encode_is_in_the_peak() -> None:
    recording = recomputable(chain([10, 80, 5, 60]), 1, (), compute_ns=7)
    recording = compressible(recording, 1, discard_ns=3, discard_bytes=55)
    packed = with_recomputes(recording, {1})
    assert packed.points[2].peak_bytes == RESIDENT + 10 + 80 + 5 + 55
    assert recorded_step(recording).with_recomputes([1]).peak_bytes == packed.peak_bytes == RESIDENT + 150


def test_what_a_codec_leaves_is_moved_where_that_costs_least() -> None:
    """A byte takes 100 ns and a point 1000 ns. After encoding, six bytes are still missing. The encoded part is small
    enough to be offloaded before the next point is reached, and every other storage is too large."""
    recording = compressible(recomputable(chain([40, 80, 20, 1, 85]), 1, (), compute_ns=7), 1, discard_ns=3)
    budget = RESIDENT + 150
    assert with_recomputes(recording, {1}).peak_bytes == budget + 6
    planned = plan_step(recording, SLOW, budget, "auto")
    actions = [one.action for one in planned.plan.lifetimes]
    assert actions == [Action.KEEP, Action.COMPRESS, Action.KEEP, Action.KEEP, Action.KEEP, Action.OFFLOAD]
    assert planned.timeline.peak_bytes <= budget
    assert planned.timeline.step_ns == recording.compute_ns + 10
    assert [(one.lifetime, one.nbytes) for one in planned.timeline.copies] == [(5, 10), (5, 10)]
    assert planned.timeline.step_ns < plan_step(recording, SLOW, budget, "auto-offload").timeline.step_ns
    assert lower_bound(recording, SLOW, budget).step_ns <= planned.timeline.step_ns


def test_what_a_recompute_needs_is_recomputed_before() -> None:
    recording = recomputable(recomputable(chain([10, 20, 30]), 2, (1,), compute_ns=5), 1, (0,), compute_ns=7)
    recomputed = with_recomputes(recording, {1, 2})
    assert [(point.kind, point.lifetime) for point in recomputed.points[3:6]] == [
        (PointKind.USE, 0),
        (PointKind.USE, 1),
        (PointKind.USE, 2),
    ]
    assert recomputed.compute_ns == recording.compute_ns + 12, "the second is used again, and not recomputed again"


def test_a_recompute_nobody_knows_is_refused() -> None:
    with pytest.raises(VdnnError, match="got lifetime .*, for which it has none"):
        with_recomputes(chain([10, 20]), {0})


def test_auto_recomputes_what_no_link_could_bring_back_in_time() -> None:
    """At the least budget the copies of the last map overlap with nothing. Its recompute takes a nanosecond."""
    recording = recomputable(chain([10, 2000, 2000], compute_ns=10), 1, (0,), compute_ns=1)
    budget = recording.peak_bytes - 1000
    moved = plan_step(recording, EVEN, budget, "auto-offload")
    planned = plan_step(recording, EVEN, budget, "auto")
    assert planned.plan.lifetimes[1].action is Action.RECOMPUTE
    assert planned.timeline.step_ns == recording.compute_ns + 1 < moved.timeline.step_ns
    assert planned.timeline.peak_bytes <= budget


def shortest(recording: Recording, costs: LinkCosts, budget: int) -> int:
    candidates = candidates_of(recording)
    found = []
    for count in range(len(candidates) + 1):
        for chosen in itertools.combinations(candidates, count):
            best = shortest_steps(with_recomputes(recording, chosen), costs, [budget])[0]
            if best is not None:
                found.append(best)
    return min(found)


@pytest.mark.slow
@quick_and_full("examples", 15, 120)
def test_its_step_is_the_shortest_there_is(examples: int) -> None:
    for_examples(examples, assert_its_step_is_the_shortest, recording=any_recomputable_recording(4), costs=LINKS)


def assert_its_step_is_the_shortest(recording: Recording, costs: LinkCosts) -> None:
    """auto's step is the shortest over all choices of recomputes with all offloads for each. The bound is not above
    it."""
    candidates = candidates_of(recording)
    assume(candidates)
    assume(count_of_plans(with_recomputes(recording, candidates)) * 2 ** len(candidates) <= 3000)
    assume(count_of_plans(recording) <= 2000)
    least, most = least_bytes(recording), recording.peak_bytes
    for budget in {least, (least + most) // 2, max(least, most - 1)}:
        best = shortest(recording, costs, budget)
        planned = plan_step(recording, costs, budget, "auto")
        assert max(interval_bytes(planned.followed, planned.plan.lifetimes)) <= budget
        assert planned.timeline == simulate(recording, planned.plan, costs)
        assert best <= planned.timeline.step_ns <= best * 1.01
        assert planned.timeline.step_ns <= plan_step(recording, costs, budget, "auto-offload").timeline.step_ns
        assert lower_bound(recording, costs, budget).step_ns <= best
