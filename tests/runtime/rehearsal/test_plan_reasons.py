"""A plan says what would not fit, which policies cannot be planned, and leaves the reserve that training leaves."""

from __future__ import annotations

import re
from typing import Any

import pytest

import vdnn
from benchmarks.models import unet
from tests.runtime.rehearsal.programs import perceptron as mlp
from tests.runtime.rehearsal.test_plan_ahead import plan_of
from vdnn.errors import BudgetError
from vdnn.hardware import load_profile
from vdnn.planning.policies.vdnn_all import VdnnAll
from vdnn.runtime.machine.virtual_machine import VirtualMachine
from vdnn.step.plan import Action


@pytest.mark.slow
def test_an_explanation_says_what_would_not_fit() -> None:
    report = plan_of(mlp, 8192, budget="min", optimizer="adamw", explains=40)
    refused = [one for one in report.storages if one.unfitting]
    assert Action.OFFLOAD in {one.action for one in refused}
    assert all(one.second_best not in one.unfitting for one in refused)
    assert re.search(r"none: keep( and \w+)? would not fit", str(report))
    wide = plan_of(unet, 4, budget="min", hardware="h100", explains=40)
    assert any(one.more_ns == 0 for one in wide.storages), "a short search may find a step that is as short"
    assert " 0.000 ms" not in str(wide)
    assert " nothing  " in str(wide)


@pytest.mark.parametrize("policy", ["recompute-all", VdnnAll()])
def test_a_policy_that_decides_at_each_save_says_why_it_cannot_be_planned(policy: Any) -> None:
    with pytest.raises(ValueError, match="makes no plans: it decides at each save, in a step that runs under vdnn.off"):
        plan_of(mlp, 2, policy=policy)


def test_a_plan_without_a_budget_leaves_the_reserve_that_training_leaves() -> None:
    card = load_profile("titan-x").memory_bytes
    with VirtualMachine("titan-x") as machine:
        model, x = mlp(8192)
        with vdnn.offload(device=machine) as session:
            for _ in range(3):
                model(x).sum().backward()
                session.step()
            trained, said = session.plan, str(session.report())
    assert trained is not None
    assert "last step run in virtual time: " in said
    assert "measured" not in said
    planned = plan_of(mlp, 8192).planned.plan
    assert planned.budget_bytes == trained.budget_bytes == int(0.9 * card)


def test_what_no_batch_makes_smaller_is_said_with_what_does() -> None:
    with pytest.raises(BudgetError) as refused:
        plan_of(mlp, 8192, optimizer="adamw", budget="24MiB")
    said = str(refused.value)
    assert "Parameters, gradients and optimizer state alone take 32.0" in said
    assert "so a smaller batch does not help. Train fewer parameters (LoRA)" in said
    assert "make the batch smaller" not in said
    with pytest.raises(BudgetError, match="or make the batch smaller"):
        plan_of(mlp, 8192, optimizer="adamw", budget="64MiB")
