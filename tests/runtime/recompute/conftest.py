"""In all tests of recipes, each recipe of a compiled search is compared with that of the search.

Each test begins without compiled searches: some change the table of operations, which compiled searches hold."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.runtime.recompute.shadow import Shadow, shadowing
from vdnn.runtime.recompute import compiled_search


@pytest.fixture(autouse=True)
def shadow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Shadow]:
    monkeypatch.setattr(compiled_search, "_compiled", {})
    with shadowing() as shadow:
        yield shadow
