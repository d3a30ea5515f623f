"""Two processes shared by all tests that need them, restarted after a failed job; and one thread for torch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.integrations.ranks import Ranks
from tests.runtime.conftest import default_policy, open_session, pytest_generate_tests, schedule, session

__all__ = ["default_policy", "open_session", "pytest_generate_tests", "schedule", "session"]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """The operations are tiny, so more threads of torch would only spin."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(20)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def _made() -> Iterator[list[Ranks]]:
    made: list[Ranks] = []
    yield made
    for ranks in made:
        ranks.close()


@pytest.fixture
def two_ranks(_made: list[Ranks]) -> Ranks:
    if not _made or _made[-1].closed:
        _made.append(Ranks(2))
    return _made[-1]
