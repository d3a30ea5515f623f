"""Published policies of whole trainings: their placements fit, follow their rules, and auto is never slower."""

from __future__ import annotations

import pytest

from tests.planning.training.test_training_cycles import GB, MS, machine, unit
from vdnn.planning.published.whole_state import WHOLE_STATE_POLICIES, WholeStatePolicy
from vdnn.planning.published.whole_state.fsdp2_offload import place_fsdp2_offload
from vdnn.planning.published.whole_state.protrain import place_protrain
from vdnn.planning.published.whole_state.torchao_offload import place_torchao_offload
from vdnn.planning.published.whole_state.trainstream import place_trainstream
from vdnn.planning.published.whole_state.twin_flow import place_twin_flow
from vdnn.planning.published.whole_state.zero_offload import place_zero_offload, place_zero_offload_delayed
from vdnn.planning.training.auto_placement import auto_placement
from vdnn.planning.training.cycle import cycle_of
from vdnn.planning.training.placement import Activations, Allowed, State
from vdnn.planning.training.simulate_cycle import simulate_training
from vdnn.planning.training.training import Training, TrainingMachine

TRAINING = Training("six units", tuple(unit(str(index)) for index in range(6)))
ON = machine(host_bytes_per_s=200e9, cpu_bytes_per_s=200e9)
# Six units of 1 GB of parameters, 1 of gradients, 6 of state and 2 of saves: 60 GB with all saves and gradients.
ROOMY, TIGHT = 70 * GB, 8 * GB


@pytest.mark.slow
def test_placements_fit_their_budget_and_auto_is_never_slower() -> None:
    budget_bytes = 12 * GB
    allowed = Allowed(cpu_steps=True, deferred=True)
    planned_ns = auto_placement(TRAINING, ON, budget_bytes, allowed).step_ns
    fitted = 0
    for policy in WHOLE_STATE_POLICIES:
        placement = policy.place(TRAINING, ON, budget_bytes)
        if placement is not None:
            fitted += 1
            step = simulate_training(TRAINING, ON, placement, budget_bytes)
            assert step.peak_bytes <= budget_bytes, policy.name
            assert policy.is_another_training or planned_ns <= step.step_ns, policy.name
    assert fitted >= 6


@pytest.mark.parametrize("policy", WHOLE_STATE_POLICIES, ids=lambda policy: policy.name)
def test_a_budget_below_one_unit_is_refused(policy: WholeStatePolicy) -> None:
    assert policy.place(TRAINING, ON, GB) is None


@pytest.mark.parametrize("place", [place_zero_offload, place_torchao_offload])
def test_parameters_stay_and_the_step_on_the_cpu_is_waited_for(place: object) -> None:
    placement = place(TRAINING, ON, 30 * GB)  # type: ignore[operator]
    assert all(not one.streams and one.state is State.CPU for one in placement.units)
    assert {one.activations for one in placement.units} == {Activations.KEEP}
    # 90 ms forward and backward less; the last gradient 10 ms; six steps of 14 GB at 200 GB/s, the last parameters 10.
    step = simulate_training(TRAINING, ON, placement, 30 * GB)
    assert step.step_ns >= 6 * 30 * MS + 6 * 70 * MS


def test_blocks_are_checkpointed_where_their_saves_do_not_fit() -> None:
    placement = place_zero_offload(TRAINING, ON, 12 * GB)
    assert placement is not None
    assert {one.activations for one in placement.units} == {Activations.RECOMPUTE}
    assert place_zero_offload(TRAINING, ON, TIGHT) is None


def test_a_delayed_update_hides_the_step_on_the_cpu_and_takes_host_memory() -> None:
    waiting, delayed = (place(TRAINING, ON, 30 * GB) for place in (place_zero_offload, place_zero_offload_delayed))
    assert waiting is not None
    assert delayed is not None
    steps = [simulate_training(TRAINING, ON, one, 30 * GB) for one in (waiting, delayed)]
    assert steps[1].step_ns < steps[0].step_ns
    # The host's memory is what is left: 84 GB of steps, and 12 of gradients and parameters, at 200 GB/s.
    assert steps[1].step_ns == pytest.approx(480 * MS, rel=0.001)
    assert steps[1].host_bytes - steps[0].host_bytes == 6 * GB


def test_the_lowest_ratio_that_fits_steps_on_the_cpu() -> None:
    placement = place_twin_flow(TRAINING, ON, 40 * GB)
    assert placement is not None
    on_cpu = [one.state is State.CPU for one in placement.units]
    assert on_cpu == sorted(on_cpu)
    assert 0 < sum(on_cpu) < 6
    roomy = place_twin_flow(TRAINING, ON, ROOMY)
    assert roomy is not None
    assert not any(one.state is State.CPU for one in roomy.units)


def test_all_or_nothing_streams_everything() -> None:
    placement = place_fsdp2_offload(TRAINING, ON, ROOMY)
    assert placement is not None
    assert all(one.streams and one.gradient_leaves and one.state is State.CPU for one in placement.units)


def test_chunks_are_persistent_with_their_state_or_away() -> None:
    placement = place_protrain(TRAINING, ON, 30 * GB)
    assert placement is not None
    assert all((one.state is State.DEVICE) == (not one.streams) for one in placement.units)


def test_a_tenth_of_the_memory_is_left_free() -> None:
    placement = place_trainstream(TRAINING, ON, 20 * GB)
    assert placement is not None
    assert max(cycle_of(TRAINING, placement).needed_bytes) <= 0.95 * 20 * GB


def test_a_host_that_is_too_small_fits_no_policy_that_needs_it() -> None:
    small = TrainingMachine("small", ON.link, GB, ON.host_bytes_per_s, ON.cpu_bytes_per_s)
    assert place_fsdp2_offload(TRAINING, small, ROOMY) is None
