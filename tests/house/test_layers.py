"""No room imports a higher one, planning never imports torch, and the check finds each offence."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.house.imports import ROOMS, modules_below, offences

ROOT = Path(__file__).resolve().parents[2]


def test_no_room_imports_a_higher_one() -> None:
    modules = modules_below(ROOT / "vdnn")
    assert "vdnn.doctor.examination" in modules
    assert offences(modules) == []


def rooms_in(page: str) -> list[str]:
    """The rooms that `page` lists, in its order."""
    block = (ROOT / page).read_text().split(f"```text\n{ROOMS[0]} ")[1].split("```")[0]
    return [ROOMS[0], *(line.split()[0] for line in block.splitlines()[1:])]


@pytest.mark.parametrize("page", ["docs/design.md", "CONTRIBUTING.md"])
def test_a_page_lists_the_rooms_as_they_are(page: str) -> None:
    assert rooms_in(page) == list(ROOMS)


def test_the_runtime_has_eight_rooms() -> None:
    inside = {room for room in ROOMS if room.startswith("vdnn.runtime.")}
    folders = {f"vdnn.runtime.{path.name}" for path in (ROOT / "vdnn/runtime").iterdir() if path.is_dir()}
    assert inside == folders - {"vdnn.runtime.__pycache__"}
    assert len(inside) == 8
    assert [path.name for path in (ROOT / "vdnn/runtime").glob("*.py")] == ["__init__.py"]


@pytest.mark.parametrize(
    ("modules", "offence"),
    [
        ({"vdnn.errors": "import vdnn.doctor"}, "vdnn.errors imports vdnn.doctor, which is in a higher room"),
        (
            {"vdnn.planning.costs": "from vdnn.runtime.session import session", "vdnn.runtime.session.session": ""},
            "vdnn.planning.costs imports vdnn.runtime.session.session, which is in a higher room",
        ),
        (
            {
                "vdnn.runtime.storage.transport": "from ..session.session import Session",
                "vdnn.runtime.session.session": "",
            },
            "vdnn.runtime.storage.transport imports vdnn.runtime.session.session, which is in a higher room",
        ),
        (
            {"vdnn.planning": "def late():\n    import vdnn.cli.main"},
            "vdnn.planning imports vdnn.cli.main, which is in a higher room",
        ),
        ({"vdnn.errors": "from vdnn import _C"}, "vdnn.errors imports vdnn._C, which is in a higher room"),
        (
            {"vdnn.planning.search.auto": "from vdnn.planning.published.dtr import Dtr"},
            "vdnn.planning.search.auto imports vdnn.planning.published.dtr: "
            "no vdnn.planning.search may import vdnn.planning.published",
        ),
        ({"vdnn.planning.planner": "from torch.fx import Graph"}, "vdnn.planning.planner imports torch"),
        ({"vdnn.planning.planner": "def late():\n    import torch"}, "vdnn.planning.planner imports torch"),
        ({"vdnn": "import torch"}, "vdnn imports torch when it is imported"),
        ({"vdnn.cli": "def late():\n    from vdnn import plan"}, "vdnn.cli imports vdnn, which is a face"),
        ({"vdnn.misc": ""}, "vdnn.misc is in no room"),
        (
            {
                "vdnn.report.table": "if TYPE_CHECKING:\n    from vdnn.report import chart",
                "vdnn.report.chart": "from vdnn.report.table import Table",
            },
            "vdnn.report.table imports vdnn.report.chart imports vdnn.report.table: a circle",
        ),
    ],
)
def test_the_judge_names_each_offence(modules: dict[str, str], offence: str) -> None:
    assert offences(modules) == [offence]


@pytest.mark.parametrize(
    "modules",
    [
        {"vdnn.doctor": "from vdnn.errors import VdnnError\nimport json"},
        {
            "vdnn.runtime.session.session": "import torch\nfrom vdnn.planning import planner",
            "vdnn.planning.planner": "",
        },
        {"vdnn.hardware.link_probe": "from vdnn._C import CopyDirection"},
    ],
)
def test_the_judge_lets_a_legal_import_pass(modules: dict[str, str]) -> None:
    assert offences(modules) == []
