"""OffloadArguments has every option of vdnn.offload and vdnn.Limits, with the same default."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path

import vdnn
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
