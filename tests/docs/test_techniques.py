"""docs/techniques.md has each technique of the field, with an existing place in vdnn, a tested row, or a reason."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import vdnn
from tests.integrations.test_parallel import CASES
from vdnn.planning.catalogue import policy_names
from vdnn.planning.published.whole_state import WHOLE_STATE_POLICIES

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "techniques.md").read_text()
# The techniques and systems that arXiv 2202.10435 names, and MegEngine's.
NAMED = [
    *("Revolve", "Rotor", "Chen, sublinear", "Chen, recursive sublinear", "MegEngine", "Checkmate", "MONeT", "DTR"),
    *("vDNN", "TFLMS", "AutoSwap", "SwapAdvisor", "Capuchin", "L2L", "ZeRO-Offload"),
    *("data parallel", "model parallel", "GPipe", "PipeDream", "PipeDream-2BW", "PipeMare", "DAPPLE", "Chimera"),
    *("Pipe-torch", "HetPipe", "1F1B", "interleaved 1F1B", "ZeRO, stage 1", "ZeRO, stage 2", "ZeRO, stage 3"),
    *("8-bit optimizers", "4-bit optimizers", "sparsified gradients", "quantized gradients", "low-rank gradients"),
    *("linear scaling", "LARS", "LAMB"),
]
PLACE = re.compile(r"(policy|whole training|option|program|test) `([^`]+)`")


def rows(text: str) -> dict[str, str]:
    """The last column of each technique."""
    cells = [line.strip("|").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {row[0].strip(): row[-1].strip() for row in cells if row[0].strip() != "technique"}


def known(kind: str) -> set[str]:
    if kind == "policy":
        return set(policy_names())
    if kind == "whole training":
        return {policy.name for policy in WHOLE_STATE_POLICIES}
    if kind == "option":
        return set(inspect.signature(vdnn.offload).parameters)
    return {program for program, _ in CASES}


def fault(where: str) -> str | None:
    """The first thing in a row that does not exist, or that the row has neither a place nor a reason."""
    found = PLACE.findall(where)
    for kind, name in found:
        if kind == "test":
            path, _, function = name.partition("::")
            if not (ROOT / path).exists() or f"def {function}(" not in (ROOT / path).read_text():
                return f"no test {name}"
        elif name not in known(kind):
            return f"no {kind} {name}"
    return None if found or re.match(r"not there[^:]*: \w", where) else "neither a place nor a reason"


@pytest.mark.parametrize("name", NAMED)
def test_each_technique_of_the_survey_has_a_row(name: str) -> None:
    assert any(row == name or row.startswith(f"{name}'s") for row in rows(TEXT))


@pytest.mark.parametrize(("name", "where"), rows(TEXT).items())
def test_each_row_names_what_exists_or_a_reason(name: str, where: str) -> None:
    assert fault(where) is None, name


@pytest.mark.parametrize(
    "where",
    ["policy `none-such`", "option `none`", "composed, program `none`", "test `tests/none.py::test_x`", "not there"],
)
def test_a_row_that_names_nothing_is_found(where: str) -> None:
    assert fault(where) is not None
