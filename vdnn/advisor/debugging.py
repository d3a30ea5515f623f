"""Advice on debugging tools that were on while steps ran, or are on now."""

from __future__ import annotations

from vdnn.advisor.advice import Advice, Kind, unknown
from vdnn.advisor.diagnostics import TOOLS, tools_that_are_on
from vdnn.advisor.evidence import Evidence

_UNPREDICTED = "a tool costs time of the host and of libraries, which virtual time does not model"


def debugging(evidence: Evidence) -> list[Advice]:
    found = set(tools_that_are_on()) if evidence.observed is None else set(evidence.observed.tools)
    return [
        Advice(Kind.DEBUGGING, f"{tool} is on during the step.", action, unknown(_UNPREDICTED))
        for tool, action in TOOLS.items()
        if tool in found
    ]
