"""The plans of a session in its report: how many there are, and how many steps followed which."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

import vdnn
from tests.runtime.rigs.networks import perceptron
from vdnn.report.run_folder import read_run
from vdnn.runtime.machine.virtual_machine import VirtualMachine
from vdnn.runtime.session.session import Session
from vdnn.step.plan_use import Followed, PlanUse

Step = Sequence[int]  # the sizes of its micro-batches


def trained(
    steps: Sequence[Step], extra_forward_in: int | None = None, doubled_output_in: int | None = None
) -> Session:
    """A session that ran these steps; one of them calls its first layer eight times more, or doubles its output."""
    with VirtualMachine("titan-x") as machine:
        model = perceptron(64, 12)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with vdnn.offload(budget="900KiB", device=machine, min_bytes=0) as session:
            for number, step in enumerate(steps):
                for batch in step:
                    y = model(torch.zeros(batch, 64))
                    for _ in range(8 if number == extra_forward_in else 0):
                        y = y + model[0](y)
                    torch.cat([y] * (2 if number == doubled_output_in else 1)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    return session


def use_of(session: Session) -> PlanUse:
    use = session._engine.steps.plan_use
    assert use is not None
    return use


def counts_of(session: Session) -> dict[Followed, int]:
    return {one.followed: one.steps for one in use_of(session).counts}


def test_steps_count_by_the_size_of_the_plan_that_they_followed() -> None:
    session = trained([[256], [256], [128], [256]])
    assert counts_of(session) == {Followed.OWN_SIZE: 2, Followed.LARGER_SIZE: 1, Followed.RECORDED: 1}
    use = use_of(session)
    # One more followed the plan of the warm-up.
    assert [(plan.kind, plan.first.size, plan.steps) for plan in use.plans] == [(1, (256, 64), 2)]
    lines = session.report().splitlines()
    assert (
        "  plans: for 1 kind of step and 1 size; 3 made, 1 of them again for less memory, from 3 recorded steps"
        in lines
    )
    assert (
        "  steps: 3 of 4 followed a plan (75 %): 2 of their own size, 1 of a larger size; 1 ran without one (1 "
        "recorded)" in lines
    )


def test_a_step_that_becomes_larger_than_its_plan_outgrew_it() -> None:
    session = trained([[64], [64], [64]], doubled_output_in=2)
    assert counts_of(session)[Followed.OUTGREW] == 1


def test_each_micro_batch_counts_by_the_plan_of_its_own_size() -> None:
    session = trained([[64, 96], [64, 96], [64, 96], [64, 96]])
    assert session.num_steps == 4
    assert counts_of(session)[Followed.OWN_SIZE] >= 4
    assert {plan.first.size[0] for plan in use_of(session).plans} == {64, 96}


def test_a_step_that_turns_out_to_be_of_another_kind_is_counted_as_such() -> None:
    session = trained([[64], [64], [64], [64]], extra_forward_in=2)
    assert counts_of(session)[Followed.ANOTHER_KIND] == 1
    assert counts_of(session)[Followed.OWN_SIZE] == 2


def test_a_plan_that_is_made_again_for_less_memory_counts() -> None:
    with VirtualMachine("titan-x") as machine:
        model = perceptron(64, 12)
        kept = []
        with vdnn.offload(budget="880KiB", device=machine, min_bytes=0) as session:
            for number in range(5):
                y = model(torch.zeros(256, 64))
                if number > 1:
                    kept.append(torch.zeros(256, 64))  # held beside the step, and never seen by the planner
                y.square().sum().backward()
    use = use_of(session)
    assert use.tightened > 0
    assert use.made == use.tightened + 2, "a plan of the warm-up, and one of the step after it"
    assert f"{use.made} made, {use.tightened} of them again for less memory" in session.report()


def test_a_session_without_plans_says_nothing_of_plans() -> None:
    with VirtualMachine("titan-x") as machine:
        model = perceptron(64, 12)
        with vdnn.offload("vdnn-all", device=machine, min_bytes=0, measure=True) as session:
            for _ in range(3):
                model(torch.zeros(64, 64)).square().sum().backward()
    assert session._engine.steps.plan_use is None
    assert "steps: " not in session.report()
    assert "plans:" not in session.report()


def test_a_session_of_changing_shapes_is_saved_with_the_step_that_its_plan_is_for(tmp_path: Path) -> None:
    session = trained([[256], [256], [300], [128]])
    assert session.recording is not None
    session.save(tmp_path, "step")
    (step,) = read_run(tmp_path).steps  # refuses a plan and a recording of different steps
    assert step.plan == session.plan
    assert step.measured is None, "the last step was smaller: its figures are no measure of this plan"
    assert step.predicted is not None
    assert step.plan_use == use_of(session)


def test_a_step_of_the_size_of_its_plan_is_saved_as_measured(tmp_path: Path) -> None:
    session = trained([[256], [256], [256]])
    session.save(tmp_path, "step")
    (step,) = read_run(tmp_path).steps
    assert step.predicted is None
    assert step.measured == session.timeline
