"""The cycle of a whole training and its simulation, compared with times and bytes that were worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from tests.planning.training.random_trainings import random_training
from vdnn.errors import InvalidArgumentError
from vdnn.planning.costs import LinkCosts
from vdnn.planning.training.cycle import ByteClass, TaskKind, cycle_of
from vdnn.planning.training.placement import (
    Activations,
    Placement,
    State,
    StepTime,
    UnitPlacement,
    all_alike,
    unit_choices,
)
from vdnn.planning.training.simulate_cycle import TrainingStep, simulate_training
from vdnn.planning.training.training import Training, TrainingMachine, Unit

GB, MS = 1_000_000_000, 1_000_000
ROOM = 1_000 * GB


def unit(name: str, **changed: int) -> Unit:
    """10 ms forward, 20 ms backward, 1 GB of parameters and gradients, 6 GB of state, 2 GB of saves."""
    values = {
        "weight_bytes": GB,
        "frozen_bytes": 0,
        "gradient_bytes": GB,
        "state_bytes": 6 * GB,
        "saved_bytes": 2 * GB,
        "boundary_bytes": GB // 2,
        "forward_ns": 10 * MS,
        "backward_ns": 20 * MS,
        "forward_transient_bytes": 0,
        "backward_transient_bytes": 0,
        "step_ns": 5 * MS,
        "host_step_bytes": 14 * GB,
    }
    return Unit(name, **(values | changed))


def machine(**changed: float) -> TrainingMachine:
    """A link of 100 GB/s each way, 200 in both, and a host that never holds anything up."""
    link = LinkCosts(100e9, 100e9, 200e9, 0)
    rates = {"host_bytes_per_s": 1e15, "cpu_bytes_per_s": 1e15} | changed
    return TrainingMachine("a machine", link, 1 << 50, **rates)


def simulated(
    training: Training, placement: Placement, on: TrainingMachine | None = None, budget_bytes: int = ROOM
) -> TrainingStep:
    return simulate_training(training, on or machine(), placement, budget_bytes)


def test_everything_on_the_device_takes_the_time_of_computing_and_all_bytes() -> None:
    training = Training("two units", (unit("a"), unit("b")), fixed_bytes=7)
    step = simulated(training, all_alike(training, UnitPlacement()))
    assert step.step_ns == training.computing_ns == 2 * 35 * MS
    # At the backward of b: all parameters, state and saves, and the gradient of b.
    assert step.peak_bytes == 7 + 2 * (1 + 6 + 2) * GB + GB
    assert (step.to_device_bytes, step.to_host_bytes, step.host_bytes) == (0, 0, 0)


def test_a_recompute_adds_a_forward_and_keeps_only_the_boundary() -> None:
    training = Training("two units", (unit("a"), unit("b")))
    step = simulated(training, all_alike(training, UnitPlacement(Activations.RECOMPUTE)))
    assert step.step_ns == training.computing_ns + 20 * MS
    held = [one[ByteClass.ACTIVATION] for one in step.needed]
    # Forward a, forward b, backward b, backward a, and the two steps.
    assert held[:4] == [GB // 2, GB, 5 * GB // 2, 2 * GB]
    assert not any(held[4:])


def test_an_offloaded_save_waits_for_the_link() -> None:
    training = Training("two units", (unit("a", saved_bytes=10 * GB), unit("b")))
    offloaded = Placement((UnitPlacement(Activations.OFFLOAD), UnitPlacement()))
    step = simulated(training, offloaded)
    assert (step.to_host_bytes, step.to_device_bytes) == (10 * GB, 10 * GB)
    # With room: out for 100 ms beside b's forward and backward (30 ms), then back for 100 ms, then a's backward.
    tight = simulated(training, offloaded, budget_bytes=max(cycle_of(training, offloaded).needed_bytes))
    assert tight.step_ns >= training.computing_ns + 170 * MS
    assert tight.peak_bytes <= max(cycle_of(training, offloaded).needed_bytes)


def test_state_on_the_host_crosses_the_link_in_both_directions_in_each_step() -> None:
    training = Training("a unit", (unit("a"),))
    placement = Placement((UnitPlacement(state=State.HOST),), slice_bytes=6 * GB)
    step = simulated(training, placement)
    # 60 ms in, 5 ms of the step, 60 ms out; with room the state comes while forward and backward run.
    assert (step.to_host_bytes, step.to_device_bytes, step.host_bytes) == (6 * GB, 6 * GB, 6 * GB)
    assert step.step_ns == pytest.approx(125 * MS, rel=1e-6)


def test_the_hosts_memory_is_shared_by_copies_and_steps_on_the_cpu() -> None:
    training = Training("a unit", (unit("a"),), clips=True)
    placement = Placement((UnitPlacement(gradient_leaves=True, state=State.CPU),))
    # Backward ends at 30 ms, its gradient takes 10, the step 14 GB / 50 GB/s = 280, the parameters 10 to the device.
    alone = simulated(training, placement, machine(cpu_bytes_per_s=50e9))
    assert alone.step_ns == pytest.approx(330 * MS, rel=1e-6)
    # A host of 25 GB/s: the gradient takes 40 ms, the step 560, the parameters 40.
    slow = simulated(training, placement, machine(cpu_bytes_per_s=50e9, host_bytes_per_s=25e9))
    assert slow.step_ns == pytest.approx(670 * MS, rel=1e-6)


def test_a_deferred_step_hides_behind_the_forward_of_the_units_before() -> None:
    units = tuple(unit(str(index), state_bytes=GB // 2, step_ns=0) for index in range(8))
    training = Training("eight units", units)
    at_end, deferred = (
        simulated(
            training,
            all_alike(training, UnitPlacement(state=State.HOST), time),
            budget_bytes=40 * GB,
        )
        for time in (StepTime.END, StepTime.DEFERRED)
    )
    assert deferred.step_ns <= at_end.step_ns
    assert deferred.step_ns == pytest.approx(training.computing_ns, rel=0.05)


def test_a_step_in_backward_frees_each_gradient_at_once() -> None:
    units = tuple(unit(str(index)) for index in range(6))
    training = Training("six units", units, clips=False)
    gradients = [
        max(one[ByteClass.GRADIENT] for one in simulated(training, all_alike(training, UnitPlacement(), time)).needed)
        for time in (StepTime.END, StepTime.IN_BACKWARD)
    ]
    assert gradients == [6 * GB, GB]


def test_exact_clipping_refuses_a_step_in_backward() -> None:
    training = Training("a unit", (unit("a"),), clips=True)
    with pytest.raises(InvalidArgumentError, match="clipped by their norm"):
        cycle_of(training, all_alike(training, UnitPlacement(), StepTime.IN_BACKWARD))


def test_the_tasks_run_forward_backward_and_step_for_each_micro_batch() -> None:
    training = Training("two units", (unit("a"), unit("b")), micro_batches=2)
    cycle = cycle_of(training, all_alike(training, UnitPlacement()))
    order = [(task.kind, task.unit) for task in cycle.tasks if task.kind is not TaskKind.STEP]
    one = [(TaskKind.FORWARD, 0), (TaskKind.FORWARD, 1), (TaskKind.BACKWARD, 1), (TaskKind.BACKWARD, 0)]
    assert order == one * 2


def test_copies_that_linger_leave_the_link_busy_beyond_the_step() -> None:
    training = Training("four units", tuple(unit(str(index), step_ns=0) for index in range(4)))
    # 24 GB of state cross the link in and out. What came early or leaves late does so beside forward and backward.
    placement = all_alike(training, UnitPlacement(state=State.HOST))
    prompt, unhurried = (
        simulated(training, replace(placement, slice_bytes=GB, room_share_of_steps=share), budget_bytes=22 * GB)
        for share in (0.0, 0.5)
    )
    assert unhurried.step_ns < prompt.step_ns
    assert unhurried.peak_bytes <= 22 * GB


def test_a_step_that_is_waited_for_holds_up_the_whole_forward() -> None:
    training = Training("two units", (unit("a"), unit("b")))
    placement = all_alike(training, UnitPlacement(streams=True, gradient_leaves=True, state=State.CPU))
    on = machine(cpu_bytes_per_s=100e9)
    alone, waiting = (
        simulated(training, replace(placement, forward_waits_for_steps=waits), on) for waits in (False, True)
    )
    # Each step takes 140 ms: without waiting, the forward of the first unit begins after its own.
    assert waiting.step_ns - alone.step_ns == pytest.approx(20 * MS, abs=15 * MS)


@pytest.mark.parametrize("seed", range(60))
def test_each_placement_stays_under_its_budget_and_moves_what_it_says(seed: int) -> None:
    case = random_training(seed, 2)
    for choice in unit_choices(case.training, 0, case.allowed):
        placement = Placement((choice, UnitPlacement()))
        cycle = cycle_of(case.training, placement)
        budget_bytes = max(case.budget_bytes, *cycle.needed_bytes)
        step = simulate_training(case.training, case.machine, placement, budget_bytes)
        assert step.peak_bytes <= budget_bytes
        assert all(held >= sum(needed.values()) for held, needed in zip(step.held, step.needed, strict=True))
        link = case.machine.link
        assert step.step_ns >= math.floor(1e9 * step.to_device_bytes / link.to_device_bytes_per_s)
        assert step.step_ns >= math.floor(1e9 * step.to_host_bytes / link.to_host_bytes_per_s)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"saved_bytes": -1}, "saved_bytes"),
        ({"boundary_bytes": 3 * GB}, "at most the saved bytes"),
    ],
)
def test_a_unit_without_sense_is_refused(wrong: dict[str, int], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        unit("a", **wrong)


@pytest.mark.parametrize(("clips", "earliest"), [(True, 0), (False, -1)])
def test_parameters_stepped_on_the_cpu_return_behind_all_backwards_only_if_gradients_are_clipped(
    clips: bool, earliest: int
) -> None:
    """The tasks are two forwards and two backwards. Unit 1 has its backward first, one task before the end."""
    training = Training("two units", (unit("0"), unit("1")), 1, clips, 0)
    placement = all_alike(training, UnitPlacement(streams=True, gradient_leaves=True, state=State.CPU))
    (of_unit_1,) = [move for move in cycle_of(training, placement).ins if (move.unit, move.task) == (1, 1)]
    assert of_unit_1.byte_class is ByteClass.PARAMETER
    assert of_unit_1.earliest == earliest


@pytest.mark.parametrize(("step_time", "leaving"), [(StepTime.IN_BACKWARD, []), (StepTime.END, [1])])
def test_a_gradient_that_is_stepped_right_behind_its_backward_does_not_leave(
    step_time: StepTime, leaving: list[int]
) -> None:
    """After the whole backward, the step of unit 0 comes first, right behind its backward, and that of unit 1 later."""
    training = Training("two units", (unit("0"), unit("1")), clips=False)
    cycle = cycle_of(training, all_alike(training, UnitPlacement(gradient_leaves=True), step_time))
    assert [move.unit for move in cycle.outs if move.byte_class is ByteClass.GRADIENT] == leaving
    assert {move.unit for move in cycle.ins if move.byte_class is ByteClass.GRADIENT} == set(leaving)
