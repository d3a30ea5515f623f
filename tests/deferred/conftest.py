"""Runs tests on the deferred accelerator in every mode.

Loaded before torch's first backward, because the autograd engine counts the devices at that time.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from deferred import Mode
from deferred.extension import load_extension
from tests.drawn import draw_one
from tests.seeding import seed_only_what_is_there

load_extension()
seed_only_what_is_there()


# Matrices of models, optimizers and loops, of which one mode each is enough here.
DRAWN = Path(__file__).with_name("test_training_state.py")


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is marked
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    draw_one([item for item in items if item.path == DRAWN], {"mode": {mode: mode.name.lower() for mode in Mode}})


@pytest.fixture(params=list(Mode), ids=[mode.name.lower() for mode in Mode])
def mode(request: pytest.FixtureRequest) -> Mode:
    mode: Mode = request.param
    return mode


@pytest.fixture(autouse=True)
def _same_numbers_each_time() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(11)
    yield
    torch.set_num_threads(threads)
