"""After each test, undoes what random programs change in the process, because other tests run in the same one.

Recipes of compiled searches are compared with those of the search."""

from __future__ import annotations

import gc
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
    gc.unfreeze()
    torch.set_num_threads(threads)
