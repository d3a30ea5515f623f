"""Poisons what is dropped, for the tests of parameters that leave the device."""

from __future__ import annotations

import pytest
import torch

from vdnn.runtime.storage.source import natively_held
from vdnn.runtime.training_state.state_copies import Moving, StateCopies


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of every copy on the device become NaN when it is dropped, or has left, and nobody else holds it.
    Returns sizes."""
    release = StateCopies._release
    found: list[int] = []

    def poison_and_release(copies: StateCopies, moving: Moving) -> None:
        copies.transport.device.synchronize(moving.complete)
        for tensor in moving.tensors:
            # The tensor and the object that is asked.
            if natively_held(tensor.untyped_storage()._cdata) == 2 and tensor.is_floating_point():
                with torch.no_grad():
                    tensor.fill_(float("nan"))
                found.append(tensor.nbytes)
        release(copies, moving)

    monkeypatch.setattr(StateCopies, "_release", poison_and_release)
    return found
