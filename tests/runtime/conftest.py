"""Sessions over CPU tensors on the simulated device: under every schedule, with poisoned memory and the ordering
checker.

A session of `open_session` moves everything (min_bytes=0) through windows of a few KiB, so that even a tiny model has
copies that wait, are in flight and are complete at any moment. After the test the session may hold nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch

from tests.conftest import SCHEDULE_IDS, SCHEDULES
from tests.drawn import draw_one
from tests.runtime.rigs.limits import grouped
from tests.runtime.rigs.side_by_side import assert_nothing_alive
from tests.runtime.rigs.virtual_training import decided_by
from tests.runtime.unusual.every_mode import PLAN_MODES
from tests.seeding import seed_only_what_is_there
from vdnn import _C
from vdnn.runtime.recompute.proofs import disabled_recipes
from vdnn.runtime.session.offload import offload
from vdnn.runtime.session.session import Session
from vdnn.step.plan import Plan

seed_only_what_is_there()


class OpenSession(Protocol):
    """Makes a session on a device of its own. The options are those of vdnn.offload."""

    def __call__(self, policy: str | Plan | None = None, **options: Any) -> Session: ...


# For modules whose tests hold for copied and for recomputed storages: `make test-full` runs tests that use a session
# either way, and `make test` one way each.
EITHER_WAY = pytest.mark.either_way
EITHER_POLICY = ("vdnn-all", "recompute-all")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "default_policy" in metafunc.fixturenames and metafunc.definition.get_closest_marker("either_way"):
        metafunc.parametrize("default_policy", EITHER_POLICY, indirect=True)


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is marked
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ours = [item for item in items if Path(__file__).parent in item.path.parents]
    schedules = dict(zip(SCHEDULES, SCHEDULE_IDS, strict=True))
    draw_one(ours, {"schedule": schedules, "default_policy": {policy: policy for policy in EITHER_POLICY}})
    draw_one(ours, {"mode": {mode: mode for mode in PLAN_MODES}})


@pytest.fixture(autouse=True)
def _recipes_as_they_were() -> Iterator[None]:
    """Enables the recipes that a recheck of the test disabled in this process."""
    yield
    disabled_recipes.clear()


@pytest.fixture(autouse=True)
def _same_numbers_each_time() -> Iterator[None]:
    """Fixes the random seed. Sets one thread, because the operations are tiny and torch's threads would only spin."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(20)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=SCHEDULES, ids=SCHEDULE_IDS)
def schedule(request: pytest.FixtureRequest) -> _C.Schedule:
    schedule: _C.Schedule = request.param
    return schedule


@pytest.fixture
def default_policy(request: pytest.FixtureRequest) -> str:
    """The policy of sessions that are opened without one."""
    return str(getattr(request, "param", "vdnn-all"))


@pytest.fixture
def open_session(schedule: _C.Schedule, default_policy: str) -> Iterator[OpenSession]:
    opened: list[tuple[Session, _C.OrderingChecker]] = []

    def make(policy: str | Plan | None = None, **options: Any) -> Session:
        device: Any = _C.OrderingChecker(_C.SimDevice(schedule=schedule, seed=7 + len(opened)))
        sizes = {"min_bytes": 0, "offload_window": "2KiB", "reload_window": "6KiB", **options}
        opened.append((offload(**decided_by(policy or default_policy), device=device, **grouped(sizes)), device))
        return opened[-1][0]

    yield make
    for session, device in opened:
        if not device.closed:
            assert_nothing_alive(session)
        session.close()
        device.close()
        assert device.take_violations() == []


@pytest.fixture
def session(open_session: OpenSession) -> Session:
    return open_session()
