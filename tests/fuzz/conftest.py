"""After each test, undoes what random programs change in the process, because other tests run in the same one. What
there is stays frozen: each module of tests begins so (tests/conftest.py).

Recipes of compiled searches are compared with those of the search."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch

from tests.fuzz.run import prepare
from tests.runtime.recompute.shadow import shadowing


@pytest.fixture(autouse=True)
def prepared() -> Iterator[None]:
    threads = torch.get_num_threads()
    with warnings.catch_warnings(), shadowing():
        prepare()
        yield
    torch.set_num_threads(threads)
