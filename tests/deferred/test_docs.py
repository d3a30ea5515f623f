"""The program of docs/deferred.md runs unchanged, and finds what the page says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest


def test_the_example_finds_its_fault(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "deferred.md").read_text()
    example = re.search(r"```python\n(.*?)```", page, re.DOTALL)
    assert example is not None
    names: dict[str, Any] = {"__name__": "example"}
    exec(compile(example[1], "docs/deferred.md", "exec"), names)
    for (mended, _), (right, violations, synchronous) in names["found"].items():
        assert bool(violations) is not mended
        assert right or not mended
        assert synchronous == {}
    assert not all(right for (mended, _), (right, *_) in names["found"].items() if not mended)
    assert "release" in capsys.readouterr().out
