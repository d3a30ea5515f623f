"""Fixtures of the transfer tests: a rig over every device, and one over the simulated device at its latest."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.transfer.transfer_rig import TransferRig
from vdnn import _C


@pytest.fixture
def rig(device: _C.Device) -> Iterator[TransferRig]:
    """A rig with an ordering checker, so that every device shows that the queue orders all its accesses."""
    made = TransferRig(_C.OrderingChecker(device))
    yield made
    made.close()


@pytest.fixture
def lazy() -> Iterator[_C.Device]:
    made = _C.OrderingChecker(_C.SimDevice(schedule=_C.Schedule.LAZY))
    yield made
    made.close()
