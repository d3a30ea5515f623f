"""In all tests of recipes, each recipe of a compiled search is compared with that of the search."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.runtime.recompute.shadow import Shadow, shadowing


@pytest.fixture(autouse=True)
def shadow() -> Iterator[Shadow]:
    with shadowing() as shadow:
        yield shadow
