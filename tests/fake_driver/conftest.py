"""The fake driver and a raw way to call it, reset before each of its own tests and released after it."""

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
    """An initialized driver with a context. The test fails if it leaks anything that `cuda` does not release."""
    driver = RawDriver(fake.path)
    driver.open()
    yield driver
    fake.reset()
    driver.close()
    assert fake.leaks() == {}
