"""What the transfer tests run on: a rig over every device, and the simulated device at its latest."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.transfer.transfer_rig import TransferRig
from vdnn import _C


@pytest.fixture
def rig(device: _C.Device) -> Iterator[TransferRig]:
    """Over a checker, so that every edge the queue needs is proven on every device."""
    made = TransferRig(_C.OrderingChecker(device))
    yield made
    made.close()


@pytest.fixture
def lazy() -> Iterator[_C.Device]:
    made = _C.OrderingChecker(_C.SimDevice(schedule=_C.Schedule.LAZY))
    yield made
    made.close()
