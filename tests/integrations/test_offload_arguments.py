"""OffloadArguments has every option of vdnn.offload, with the same default."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path

import vdnn
from vdnn.integrations.offload_arguments import OffloadArguments
from vdnn.step.plan import Plan


def test_it_has_every_option_with_its_default() -> None:
    parameters = inspect.signature(vdnn.offload).parameters
    fields = {field.name: field.default for field in dataclasses.fields(OffloadArguments)}
    assert fields == {f"vdnn_{name}": parameter.default for name, parameter in parameters.items()}


def test_its_options_are_those_of_offload() -> None:
    assert OffloadArguments().options() == {
        name: parameter.default for name, parameter in inspect.signature(vdnn.offload).parameters.items()
    }


def test_a_plan_is_loaded_from_its_file(tmp_path: Path) -> None:
    plan = Plan("by hand", "cpu", "titan-x", None, (), ())
    plan.save(tmp_path / "plan.json")
    assert OffloadArguments(vdnn_plan=str(tmp_path / "plan.json")).options()["plan"] == plan
