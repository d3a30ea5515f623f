"""vdnn-all with a recording: release points, reload points, and the operations at which reloads are issued."""

from __future__ import annotations

from tests.planning.policies.steps import (
    CONVOLUTION,
    EVEN,
    absences_of,
    made_plan,
    used_twice,
    with_lifetimes,
    with_operations,
)
from tests.planning.recordings import chain
from vdnn.planning.policies.vdnn_all import VdnnAllPlan
from vdnn.planning.simulate import simulate
from vdnn.step.plan import Absence

# A chain of four has saves at 0 to 3, uses at 4 (of 3) to 7 (of 0), and the end at 8; points are 1000 ns apart.


def test_every_storage_goes_at_the_end_of_its_layer_and_comes_back_one_layer_ahead() -> None:
    plan = made_plan("vdnn-all", chain([10, 10, 10, 10]))
    # The last layer's storage is used before that layer ends, so it is kept.
    assert absences_of(plan) == {0: (Absence(1, 6),), 1: (Absence(2, 5),), 2: (Absence(3, 4),)}


def test_what_others_hold_is_waited_for_when_they_let_go() -> None:
    recording = with_lifetimes(chain([10, 10, 10, 10]), {0: {"free_point": 3}})
    assert absences_of(made_plan("vdnn-all", recording))[0] == (Absence(3, 6),)


def test_what_others_hold_until_its_use_stays() -> None:
    recording = with_lifetimes(chain([10, 10, 10, 10]), {0: {"free_point": 7}})
    assert 0 not in absences_of(made_plan("vdnn-all", recording))


def test_it_goes_once_and_stays_between_its_uses() -> None:
    # The first storage is used at 4, where no earlier operation can reload it, and at 8.
    assert absences_of(made_plan("vdnn-all", used_twice([10, 10, 10, 10])))[0] == (Absence(1),)


def test_the_barrier_makes_the_layer_wait_for_its_copy() -> None:
    recording = chain([1500, 10, 10, 10])
    slow = simulate(recording, made_plan("vdnn-all", recording), EVEN)
    assert slow.marks[1].release_stall_ns == 500  # the copy runs from 1000 to 2500, and the layer ends at 2000


def test_without_the_barrier_it_goes_when_its_copy_is_done() -> None:
    recording = chain([1500, 10, 10, 10])
    plan = made_plan(VdnnAllPlan(has_barrier=False), recording)
    assert absences_of(plan)[0] == (Absence(2, 6),)  # 3000 is the first point after 2500
    assert simulate(recording, plan, EVEN).release_stall_ns == 0


def test_without_the_barrier_a_budget_has_copies_waited_for() -> None:
    recording = chain([1500, 10, 10, 10])
    plan = made_plan(VdnnAllPlan(has_barrier=False), recording, recording.points[2].peak_bytes - 1)
    assert absences_of(plan)[0] == (Absence(1, 6),)


def test_convolutions_that_need_nothing_end_the_search() -> None:
    # The convolution in between stays on the device, so no reload is issued across it.
    operations = [CONVOLUTION, CONVOLUTION, "", ""]
    recording = with_operations(chain([10, 10, 10, 10]), operations)
    recording = with_lifetimes(recording, {1: {"free_point": 6}, 2: {"free_point": 5}})
    assert absences_of(made_plan("vdnn-all", recording)) == {0: (Absence(1, 6),)}
    elsewhere = with_operations(recording, [CONVOLUTION, "", "", ""])
    assert absences_of(made_plan("vdnn-all", elsewhere)) == {0: (Absence(1, 4),)}
