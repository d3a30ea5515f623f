"""After each test, undoes what random programs change in the process, because other tests run in the same one."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator

import pytest
import torch

from tests.fuzz.run import prepare


@pytest.fixture(autouse=True)
def prepared() -> Iterator[None]:
    threads = torch.get_num_threads()
    with warnings.catch_warnings():
        prepare()
        yield
    gc.unfreeze()
    torch.set_num_threads(threads)
