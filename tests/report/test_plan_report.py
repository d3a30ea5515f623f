"""The output of `vdnn plan` for a plan without a certificate."""

from __future__ import annotations

import pytest

from tests.report.steps import reports
from vdnn.report import plan_text


@pytest.mark.parametrize(
    ("solver", "said"),
    [(None, "not certified (that needs SciPy: pip install 'vdnn[plan]')"), (object(), "not certified: not requested")],
)
def test_why_there_is_no_certificate(monkeypatch: pytest.MonkeyPatch, solver: object, said: str) -> None:
    report = reports()[0]
    assert report.planned.bound is None
    monkeypatch.setattr(plan_text, "find_spec", lambda name: solver)
    assert f"  {said}\n" in str(report)
