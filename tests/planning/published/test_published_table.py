"""The table of published policies has a row for every module of the folder, with the names of its policies."""

from __future__ import annotations

import re
from pathlib import Path

import vdnn.planning.published
from vdnn.planning.catalogue import make_planner, planner_names

FOLDER = Path(vdnn.planning.published.__file__).parent


def rows() -> dict[str, str]:
    return dict(re.findall(r"^\| `(\w+\.py)` \| ([^|]+) \|", (FOLDER / "README.md").read_text(), re.MULTILINE))


def test_every_module_of_the_folder_has_a_row() -> None:
    assert set(rows()) == {path.name for path in FOLDER.glob("*.py")} - {"__init__.py"}


def test_every_published_policy_is_in_the_row_of_its_module() -> None:
    modules = {name: type(make_planner(name)).__module__ for name in planner_names()}
    published = {name: module for name, module in modules.items() if module.startswith("vdnn.planning.published.")}
    assert len(published) == 13
    for name, module in published.items():
        assert f"`{name}`" in rows()[f"{module.rpartition('.')[2]}.py"]
