"""OffloadArguments has every option of vdnn.offload and vdnn.Limits, with the same default."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

import vdnn
from vdnn.integrations import training_run
from vdnn.integrations.offload_arguments import OffloadArguments
from vdnn.step.plan import Plan

# Objects of the program, which a command line cannot name, and what needs one of them. A callback takes the trainer's
# optimizers if it is told to.
OBJECTS = ("model", "optimizer")
IN_THEIR_PLACE = {"offload_optimizer": False}


def options_of_offload() -> dict[str, object]:
    parameters = inspect.signature(vdnn.offload).parameters
    return {name: parameter.default for name, parameter in parameters.items() if name not in OBJECTS}


def test_it_has_every_option_and_every_limit_with_its_default() -> None:
    options = options_of_offload()
    del options["limits"]
    limits = dataclasses.asdict(vdnn.Limits())
    fields = {field.name: field.default for field in dataclasses.fields(OffloadArguments)}
    assert fields == {f"vdnn_{name}": default for name, default in {**options, **limits, **IN_THEIR_PLACE}.items()}


def test_its_options_are_those_of_offload() -> None:
    assert OffloadArguments().options() == options_of_offload()


def test_limits_are_grouped_as_offload_takes_them() -> None:
    arguments = OffloadArguments.from_options(host_budget="64GiB", reload_window="1MiB")
    assert arguments.options()["limits"] == vdnn.Limits(host_budget="64GiB", reload_window="1MiB")


def test_a_plan_is_loaded_from_its_file(tmp_path: Path) -> None:
    plan = Plan("by hand", "cpu", "titan-x", None, (), ())
    plan.save(tmp_path / "plan.json")
    assert OffloadArguments(vdnn_plan=str(tmp_path / "plan.json")).options()["plan"] == plan


def test_a_plan_folder_may_have_a_number_for_a_name() -> None:
    assert OffloadArguments(vdnn_plans="2026").options()["plans"] == "2026"


def test_ranks_that_agree_on_a_plan_get_the_folder_and_the_model_that_it_is_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given: list[dict[str, Any]] = []

    def together(**options: Any) -> Any:
        given.append(options)
        return contextlib.nullcontext()

    monkeypatch.setattr(training_run, "offload_together", together)
    monkeypatch.setattr(training_run.TrainingRun, "_has_ranks_to_agree", lambda self: True)
    monkeypatch.setattr(training_run.TrainingRun, "end", lambda self: None)
    with vdnn.VirtualMachine("titan-x") as machine:
        run = training_run.TrainingRun(None, {"budget": "1GiB", "device": machine, "plans": tmp_path})
        model = torch.nn.Linear(2, 2)
        run.begin(torch.device("cuda"), (), model)
    (options,) = given
    assert options["plans"] == tmp_path
    assert options["model"] is model
