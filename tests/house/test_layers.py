"""A module imports only from its own floor or a lower one, planning never sees torch, and the judge can
convict.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.house.imports import modules_below, offences

ROOT = Path(__file__).resolve().parents[2]


def test_the_package_keeps_to_its_floors() -> None:
    modules = modules_below(ROOT / "vdnn")
    assert "vdnn.doctor.examination" in modules
    assert offences(modules) == []


@pytest.mark.parametrize(
    ("modules", "offence"),
    [
        ({"vdnn.errors": "import vdnn.doctor"}, "vdnn.errors (floor 0) imports vdnn.doctor (floor 23)"),
        (
            {"vdnn.planning.costs": "from vdnn.runtime import session", "vdnn.runtime.session": ""},
            "vdnn.planning.costs (floor 2) imports vdnn.runtime.session (floor 17)",
        ),
        (
            {"vdnn.runtime.transport.copies": "from ..session import Session", "vdnn.runtime.session": ""},
            "vdnn.runtime.transport.copies (floor 3) imports vdnn.runtime.session (floor 17)",
        ),
        (
            {"vdnn.planning": "def late():\n    import vdnn.cli"},
            "vdnn.planning (floor 2) imports vdnn.cli (floor 25)",
        ),
        ({"vdnn.errors": "from vdnn import _C"}, "vdnn.errors (floor 0) imports vdnn._C (floor 1)"),
        ({"vdnn.planning.planner": "from torch.fx import Graph"}, "vdnn.planning.planner imports torch"),
        ({"vdnn.planning.planner": "def late():\n    import torch"}, "vdnn.planning.planner imports torch"),
        ({"vdnn": "import torch"}, "vdnn imports torch when it is imported"),
        ({"vdnn.misc": ""}, "vdnn.misc stands on no floor"),
    ],
)
def test_the_judge_names_each_offence(modules: dict[str, str], offence: str) -> None:
    assert offences(modules) == [offence]


@pytest.mark.parametrize(
    "modules",
    [
        {"vdnn.doctor": "from vdnn.errors import VdnnError\nimport json"},
        {
            "vdnn.runtime.session": "import torch\nfrom vdnn.planning import planner",
            "vdnn.planning.planner": "",
        },
        {"vdnn.runtime.link_probe": "from vdnn._C import CopyDirection"},
    ],
)
def test_the_judge_lets_a_legal_import_pass(modules: dict[str, str]) -> None:
    assert offences(modules) == []
