"""largest-first: the choice of offloaded storages, and the shift of releases and reloads by layers."""

from __future__ import annotations

import pytest

from tests.planning.policies.steps import absences_of, made_plan, with_lifetimes, with_modules
from tests.planning.recordings import chain
from vdnn.planning.footprint import interval_bytes
from vdnn.planning.least_memory import least_bytes
from vdnn.planning.published.largest_first import LargestFirst, block_of
from vdnn.step.plan import Absence

# A chain of six has saves at 0 to 5, each by its own layer, and uses at 6 (of 5) to 11 (of 0).
SIZES = (10, 40, 20, 50, 30, 60)


def test_the_fewest_of_the_largest_leave() -> None:
    recording = chain(SIZES)
    budgets = [recording.peak_bytes - less for less in (1, 41, 61)]
    left = [set(absences_of(made_plan("largest-first", recording, budget))) for budget in budgets]
    # All six are on the device before points 5, 6 and 7. The largest (60) belongs to the last layer. 50 is waited for
    # at 5, too late for the first of these points, and 30 at 6.
    assert left == [{1, 3}, {1, 2, 3, 4}, {0, 1, 2, 3, 4}]


def test_of_equal_ones_the_first_saved_leaves() -> None:
    recording = chain([10, 20, 20, 10, 10, 10])
    assert set(absences_of(made_plan("largest-first", recording, recording.peak_bytes - 1))) == {1}


def test_the_last_layer_stays_however_large() -> None:
    recording = chain(SIZES)
    plan = made_plan("largest-first", recording, least_bytes(recording))
    assert 5 not in absences_of(plan)


def test_a_model_of_one_layer_has_no_last_one() -> None:
    planner = LargestFirst(layers_out=0, layers_ahead=0)
    whole = with_modules(chain(SIZES), ["layers.0.a"] * 6)
    # The layer ends after its last save, so its last storage is used at once.
    assert set(absences_of(made_plan(planner, whole, whole.peak_bytes - 1))) == {0, 1, 2, 3, 4}
    halves = with_modules(chain(SIZES), ["layers.0.a"] * 3 + ["layers.1.a"] * 3)
    assert set(absences_of(made_plan(planner, halves, halves.peak_bytes - 1))) == {1}


def test_a_copy_is_waited_for_one_layer_on_and_brought_back_one_layer_ahead() -> None:
    recording = chain(SIZES)
    # Saved at 1; the next layer saves at 2 and ends at 3. Used at 10; the layer before that use begins at 9.
    assert absences_of(made_plan("largest-first", recording, recording.peak_bytes - 1))[1] == (Absence(3, 9),)


@pytest.mark.parametrize(
    ("out", "ahead", "absence"), [(0, 0, Absence(2)), (2, 1, Absence(4, 9)), (1, 3, Absence(3, 7))]
)
def test_the_layers_in_between_can_be_chosen(out: int, ahead: int, absence: Absence) -> None:
    recording = chain(SIZES)
    planner = LargestFirst(layers_out=out, layers_ahead=ahead)
    assert absences_of(made_plan(planner, recording, recording.peak_bytes - 51))[1] == (absence,)


def test_what_others_hold_is_waited_for_when_they_let_go() -> None:
    recording = with_lifetimes(chain(SIZES), {1: {"free_point": 5}, 3: {"free_point": 8}})
    assert absences_of(made_plan("largest-first", recording, recording.peak_bytes - 1))[1] == (Absence(5, 9),)


def test_a_layer_is_a_block_of_modules() -> None:
    paths = [f"layers.{index}.{part}" for index in range(3) for part in ("a", "b")]
    recording = with_modules(chain(SIZES), paths)
    # Layers save at (0, 1), (2, 3) and (4, 5), and use at (6, 7), (8, 9) and (10, 11).
    assert absences_of(made_plan("largest-first", recording, recording.peak_bytes - 1)) == {
        1: (Absence(4, 8),),
        3: (Absence(6, 7),),
    }


@pytest.mark.parametrize(
    ("module", "block"),
    [("", ""), ("conv1", "conv1"), ("layers.3.attention.wq", "layers.3"), ("stages.1.blocks.0.conv", "stages.1")],
)
def test_a_block_is_the_path_up_to_the_first_number(module: str, block: str) -> None:
    assert block_of(module) == block


def test_the_host_budget_passes_over_what_is_too_large_for_it() -> None:
    recording = chain(SIZES)
    planner = LargestFirst(host_bytes=60)
    # 50, and the largest of those that still fit.
    assert set(absences_of(made_plan(planner, recording, least_bytes(recording)))) == {0, 3}


def test_where_the_rule_does_not_suffice_it_offloads_all_it_may() -> None:
    recording = chain(SIZES)
    plan = made_plan("largest-first", recording, least_bytes(recording))
    assert set(absences_of(plan)) == {0, 1, 2, 3, 4}
    assert max(interval_bytes(recording, plan.lifetimes)) > least_bytes(recording)
