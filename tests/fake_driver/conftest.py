"""The fake driver and a raw way to call it, reset before and given back after each of its own tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fake_driver.control import FakeDriver
from tests.fake_driver.raw_driver import RawDriver


@pytest.fixture
def fake() -> FakeDriver:
    driver = FakeDriver()
    driver.reset()
    return driver


@pytest.fixture
def cuda(fake: FakeDriver) -> Iterator[RawDriver]:
    """An initialized driver with a context; a test that leaks beyond what `cuda` gives back fails."""
    driver = RawDriver(fake.path)
    driver.open()
    yield driver
    fake.reset()
    driver.close()
    assert fake.leaks() == {}
